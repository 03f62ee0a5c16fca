"""Arguments of ``dsv3 serve``."""

from __future__ import annotations

import argparse

from dsv3_jax import chat_formats
from dsv3_jax.cli.arguments import shared
from dsv3_jax.cli.arguments.parser import Flags
from dsv3_jax.cli.arguments.roles import add_roles

SUMMARY = "Serve a model over HTTP with the APIs of OpenAI and Anthropic."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = Flags(parser)
    add.text(
        "--model", "demo, demo-sparse, a Hugging Face directory, a store, or a Hub name", "demo"
    )
    add.text("--served-name", "id of the model in the API (default: --model)", metavar="NAME")
    add.text(
        "--chat-template",
        f"chat format: {', '.join(chat_formats.NAMES)}, or a file with a Jinja template"
        " (default: the checkpoint's)",
        metavar="NAME",
    )
    add.text("--host", "address to listen on; 0.0.0.0 is all", "127.0.0.1", metavar="ADDRESS")
    add.integer("--port", "TCP port; 0 takes a free one", 8000)
    add.integer(
        "--max-len",
        "largest number of tokens of a prompt and its completion (default: 4096, or the model's"
        " last position)",
    )
    add.integer("--max-running", "largest number of completions that run at a time", 64)
    add.integer(
        "--max-waiting", "largest number of completions that wait; more get status 503", 256
    )
    add.integer("--cache-tokens", "size of the cache in tokens (default: what fits on the devices)")
    add.real(
        "--host-cache-gib",
        "host memory for cache pages, for when they are no longer on the devices (default: 0; 4"
        " with --role prefill)",
        default=0.0,
    )
    add.switch(
        "--host-cache-pinned",
        "keep pages of --host-cache-gib in pinned memory, from which devices load them without"
        " another copy; slower on an H200, see docs/serving.md",
    )
    add.path(
        "--disk-cache",
        "directory of cache pages, which a restart keeps and several servers can share; keep it"
        " from other users, because their pages would be used (default: none)",
        metavar="DIR",
    )
    add.real("--disk-cache-gib", "largest size of the files in --disk-cache", 64.0)
    add.real(
        "--prefix-load-gib",
        "host memory for cache pages on their way to the devices, of all waiting completions"
        " together (default: a quarter of --host-cache-gib, and at least 4)",
    )
    shared.add_latency_targets(add)
    shared.add_drafts(add)
    shared.add_weights(add)
    add.path(
        "--api-key-file",
        "file with one API key on each line, which clients must send (default: no keys)",
    )
    add.integer("--max-body-mib", "largest request body in MiB", 4)
    add.real("--request-seconds", "longest time of a request, waiting included (default: no limit)")
    add.real(
        "--unread-seconds",
        "longest time in which a client takes nothing of its answer; after it the request is"
        " cancelled",
        600.0,
    )
    add.real("--drain-seconds", "longest time that open requests get to finish after SIGTERM", 30.0)
    add.real(
        "--stuck-seconds",
        "longest time of a step of the engine, or without a sign of life of its process; after"
        " it the engine counts as stuck, and the server ends",
        300.0,
    )
    add.choice(
        "--log-level",
        "least level of lines on stderr; requests are info, those of probes (/health, /ready,"
        " /metrics, /version) are debug",
        "info",
        choices=("debug", "info", "warning", "error"),
    )
    add.switch(
        "--one-process",
        "serve HTTP from the engine's process; by default it has a process of its own, so that"
        " open streams do not slow the engine down, except with --role prefill or decode",
    )
    add.path(
        "--program-store",
        "directory of compiled programs, which a later start with the same model, flags and"
        " devices loads in seconds; keep it from other users, because loading runs code. On CPUs"
        " it replaces --compile-cache (default: none)",
        metavar="DIR",
    )
    add_roles(parser)
    shared.add_layout(add)
    shared.add_exchange(add)
    shared.add_compile_cache(add)
