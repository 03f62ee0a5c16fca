"""Arguments of ``dsv3 eval``."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv3_jax.cli.arguments import shared

SUMMARY = "Measure the perplexity of a model on texts."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = parser.add_argument
    add(
        "--model",
        default="demo",
        help="demo, demo-sparse, a Hugging Face directory, a store, or a Hub name (default: demo)",
    )
    add(
        "--data",
        nargs="+",
        required=True,
        metavar="PATH",
        help="text files, glob patterns or directories; each line of a .jsonl file is a JSON"
        " object with a text",
    )
    add(
        "--length",
        type=int,
        metavar="N",
        help="tokens per window (default: 1024, or fewer if the model takes no more)",
    )
    add(
        "--stride",
        type=int,
        metavar="N",
        help="tokens from one window of a text to the next (default: the length)",
    )
    add("--batch", type=int, default=8, metavar="N", help="windows per forward pass (default: 8)")
    add(
        "--cache",
        type=int,
        nargs="?",
        const=16,
        metavar="N",
        help="read windows through the KV cache in the form of decoding, N tokens per step (16 if"
        " not given; 1 is decoding itself)",
    )
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="JSON file for the sums so far, with which an interrupted command continues",
    )
    add("--resume", action="store_true", help="continue with the sums in --out")
    shared.add_weights(parser)
    shared.add_layout(parser)
    shared.add_exchange(parser)
    shared.add_compile_cache(parser)
    shared.add_json(parser)
