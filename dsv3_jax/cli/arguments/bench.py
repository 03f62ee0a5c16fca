"""Arguments of ``dsv3 bench``."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv3_jax.cli.arguments import shared

SUMMARY = "Measure a server: throughput and latencies of a trace of requests."

TRACE_NAMES = ("chat", "prefixed")
"""Names of the traces in :mod:`dsv3_jax.traces`, which imports NumPy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = parser.add_argument
    add("target", choices=["serve"], help="serve: a server with OpenAI's API, over HTTP")
    add(
        "--url",
        default="http://127.0.0.1:8000",
        help="address of the server, without /v1 (default: http://127.0.0.1:8000)",
    )
    add(
        "--trace",
        choices=TRACE_NAMES,
        help="lengths of prompts and outputs; prompts of prefixed share beginnings (default: chat)",
    )
    add("--input-len", type=int, metavar="N", help="tokens of every prompt, instead of a trace")
    add("--output-len", type=int, metavar="N", help="tokens of every output, with --input-len")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--rate",
        type=float,
        nargs="+",
        metavar="X",
        help="requests per second, with Poisson arrivals; inf sends all at once; several are"
        " measured one after the other (default: inf)",
    )
    load.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        metavar="N",
        help="closed loop: number of clients that wait for one answer before they send the next"
        " request",
    )
    add(
        "--num-requests",
        type=int,
        metavar="N",
        help="number of requests (default: all of the trace; 1000 of fixed lengths)",
    )
    add(
        "--scale",
        type=float,
        default=1.0,
        metavar="X",
        help="factor of prompt and output lengths, for small models (default: 1)",
    )
    add(
        "--vocab-size",
        type=int,
        default=1000,
        metavar="N",
        help="prompts are random token ids below N, which the model must have (default: 1000)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="changes the ids of prompts, so that a second run finds none in the server's prefix"
        " cache (default: 0)",
    )
    add("--api-key-file", type=Path, metavar="FILE", help="file with the API key to send")
    add(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw throughput against speed per user, as PNG, SVG or PDF; needs the extra plot",
    )
    add("--details", action="store_true", help="with --json: add lists with an entry per request")
    shared.add_json(parser)
