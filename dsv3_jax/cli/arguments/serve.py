"""Arguments of ``dsv3 serve``."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv3_jax import chat_formats
from dsv3_jax.cli.arguments import shared
from dsv3_jax.cli.arguments.roles import add_roles

SUMMARY = "Serve a model over HTTP with the APIs of OpenAI and Anthropic."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = parser.add_argument
    add(
        "--model",
        default="demo",
        help="demo, demo-sparse, a Hugging Face directory, a store, or a Hub name (default: demo)",
    )
    add("--served-name", metavar="NAME", help="id of the model in the API (default: --model)")
    add(
        "--chat-template",
        metavar="NAME",
        help=f"chat format: {', '.join(chat_formats.NAMES)}, or a file with a Jinja template"
        " (default: the checkpoint's)",
    )
    add(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; 0.0.0.0 is all (default: 127.0.0.1)",
    )
    add(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="TCP port; 0 takes a free one (default: 8000)",
    )
    add(
        "--max-len",
        type=int,
        metavar="N",
        help="largest number of tokens of a prompt and its completion (default: 4096, or the"
        " model's last position)",
    )
    add(
        "--max-running",
        type=int,
        default=64,
        metavar="N",
        help="largest number of completions that run at a time (default: 64)",
    )
    add(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="largest number of completions that wait; more get status 503 (default: 256)",
    )
    add(
        "--cache-tokens",
        type=int,
        metavar="N",
        help="size of the cache in tokens (default: what fits on the devices)",
    )
    add(
        "--host-cache-gib",
        type=float,
        default=0.0,
        metavar="X",
        help="host memory for cache pages, for when they are no longer on the devices (default: 0;"
        " 4 with --role prefill)",
    )
    add(
        "--host-cache-pinned",
        action="store_true",
        help="keep pages of --host-cache-gib in pinned memory, from which devices load them"
        " without another copy; slower on an H200, see docs/serving.md",
    )
    add(
        "--disk-cache",
        type=Path,
        metavar="DIR",
        help="directory of cache pages, which a restart keeps and several servers can share; keep"
        " it from other users, because their pages would be used (default: none)",
    )
    add(
        "--disk-cache-gib",
        type=float,
        default=64.0,
        metavar="X",
        help="largest size of the files in --disk-cache (default: 64)",
    )
    add(
        "--prefix-load-gib",
        type=float,
        metavar="X",
        help="host memory for cache pages on their way to the devices, of all waiting completions"
        " together (default: a quarter of --host-cache-gib, and at least 4)",
    )
    shared.add_latency_targets(parser)
    shared.add_drafts(parser)
    shared.add_weights(parser)
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with one API key on each line, which clients must send (default: no keys)",
    )
    add(
        "--max-body-mib",
        type=int,
        default=4,
        metavar="N",
        help="largest request body in MiB (default: 4)",
    )
    add(
        "--request-seconds",
        type=float,
        metavar="X",
        help="longest time of a request, waiting included (default: no limit)",
    )
    add(
        "--unread-seconds",
        type=float,
        default=600.0,
        metavar="X",
        help="longest time in which a client takes nothing of its answer; after it the request is"
        " cancelled (default: 600)",
    )
    add(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="X",
        help="longest time that open requests get to finish after SIGTERM (default: 30)",
    )
    add(
        "--stuck-seconds",
        type=float,
        default=300.0,
        metavar="X",
        help="longest time of a step of the engine, or without a sign of life of its process; after"
        " it the engine counts as stuck, and the server ends (default: 300)",
    )
    add(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least level of lines on stderr; requests are info, those of probes (/health, /ready,"
        " /metrics, /version) are debug (default: info)",
    )
    add(
        "--one-process",
        action="store_true",
        help="serve HTTP from the engine's process; by default it has a process of its own, so that"
        " open streams do not slow the engine down, except with --role prefill or decode",
    )
    add(
        "--program-store",
        type=Path,
        metavar="DIR",
        help="directory of compiled programs, which a later start with the same model, flags and"
        " devices loads in seconds; keep it from other users, because loading runs code. On CPUs it"
        " replaces --compile-cache (default: none)",
    )
    add_roles(parser)
    shared.add_layout(parser)
    shared.add_exchange(parser)
    shared.add_compile_cache(parser)
