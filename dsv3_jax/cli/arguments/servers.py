"""Arguments of ``dsv3 serve``, ``bench`` and ``doctor``."""

from __future__ import annotations

import argparse

from dsv3_jax import chat_formats
from dsv3_jax.cli.arguments import shared
from dsv3_jax.cli.arguments.parser import Flags

TRACE_NAMES = ("chat", "prefixed")
"""Names of the traces in :mod:`dsv3_jax.traces`, which imports NumPy."""


def add_serve(parser: argparse.ArgumentParser) -> None:
    add = Flags(parser)
    add.text("--model", shared.MODEL, "demo")
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
    _add_roles(parser)
    shared.add_layout(add)
    shared.add_exchange(add)
    shared.add_compile_cache(add)


def _add_roles(parser: argparse.ArgumentParser) -> None:
    add = Flags(parser.add_argument_group("prefill and decode on separate servers"))
    add.choice(
        "--role",
        "prefill: also computes cache pages of prompts for decode servers; decode: pulls these"
        " pages from the servers of --prefill-url and computes what does not arrive (default:"
        " both, a server on its own)",
        choices=("both", "prefill", "decode"),
        default="both",
    )
    add.argument(
        "--prefill-url",
        action="append",
        metavar="URL",
        help="a prefill server, for --role decode; can be given several times",
    )
    add.path(
        "--prefill-api-key-file",
        "file whose first key the prefill servers expect (default: no key)",
    )
    add.real(
        "--prefill-seconds",
        "longest time for the pages of a prompt to arrive; after it the decode server computes"
        " them (default: 30)",
    )
    add.integer(
        "--prefill-min-tokens",
        "prompts with fewer tokens that are not cached are left to the decode server (default: 64)",
    )
    add.choice(
        "--transfer",
        "transport of the pages, the same on both sides: HTTP answers, or"
        " jax.experimental.transfer, whose port must be reachable by decode servers alone"
        " (default: http)",
        choices=("http", "jax"),
    )
    add.integer(
        "--transfer-port",
        "TCP port of --transfer jax on a prefill server; 0 takes a free one (default: 0)",
    )


def add_bench(parser: argparse.ArgumentParser) -> None:
    add = Flags(parser)
    add.choice("target", "serve: a server with OpenAI's API, over HTTP", choices=["serve"])
    add.text("--url", "address of the server, without /v1", "http://127.0.0.1:8000")
    add.choice(
        "--trace",
        "lengths of prompts and outputs; prompts of prefixed share beginnings (default: chat)",
        choices=TRACE_NAMES,
    )
    add.integer("--input-len", "tokens of every prompt, instead of a trace")
    add.integer("--output-len", "tokens of every output, with --input-len")
    load = Flags(parser.add_mutually_exclusive_group())
    load.real(
        "--rate",
        "requests per second, with Poisson arrivals; inf sends all at once; several are"
        " measured one after the other (default: inf)",
        nargs="+",
    )
    load.integer(
        "--concurrency",
        "closed loop: number of clients that wait for one answer before they send the next request",
        nargs="+",
    )
    add.integer(
        "--num-requests", "number of requests (default: all of the trace; 1000 of fixed lengths)"
    )
    add.real("--scale", "factor of prompt and output lengths, for small models", 1.0)
    add.integer(
        "--vocab-size", "prompts are random token ids below N, which the model must have", 1000
    )
    add.integer(
        "--seed",
        "changes the ids of prompts, so that a second run finds none in the server's prefix cache",
        0,
    )
    add.path("--api-key-file", "file with the API key to send")
    add.path(
        "--picture",
        "draw throughput against speed per user, as PNG, SVG or PDF; needs the extra plot",
    )
    add.switch("--details", "with --json: add lists with an entry per request")
    shared.add_json(add)


def add_doctor(parser: argparse.ArgumentParser) -> None:
    add = Flags(parser)
    shared.add_json(add)
    add.switch(
        "--collectives",
        "also time each --exchange, which brings tokens to experts on other devices",
    )
