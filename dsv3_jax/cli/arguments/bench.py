"""Arguments of ``dsv3 bench``."""

from __future__ import annotations

import argparse

from dsv3_jax.cli.arguments import shared
from dsv3_jax.cli.arguments.parser import Flags

SUMMARY = "Measure a server: throughput and latencies of a trace of requests."

TRACE_NAMES = ("chat", "prefixed")
"""Names of the traces in :mod:`dsv3_jax.traces`, which imports NumPy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
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
