"""Arguments of ``dsv3 eval``."""

from __future__ import annotations

import argparse

from dsv3_jax.cli.arguments import shared
from dsv3_jax.cli.arguments.parser import Flags

SUMMARY = "Measure the perplexity of a model on texts."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = Flags(parser)
    add.text(
        "--model", "demo, demo-sparse, a Hugging Face directory, a store, or a Hub name", "demo"
    )
    add.text(
        "--data",
        "text files, glob patterns or directories; each line of a .jsonl file is a JSON object"
        " with a text",
        nargs="+",
        required=True,
        metavar="PATH",
    )
    add.integer(
        "--length", "tokens per window (default: 1024, or fewer if the model takes no more)"
    )
    add.integer("--stride", "tokens from one window of a text to the next (default: the length)")
    add.integer("--batch", "windows per forward pass", 8)
    add.integer(
        "--cache",
        "read windows through the KV cache in the form of decoding, N tokens per step (16 if"
        " not given; 1 is decoding itself)",
        nargs="?",
        const=16,
    )
    add.path("--out", "JSON file for the sums so far, with which an interrupted command continues")
    add.switch("--resume", "continue with the sums in --out")
    shared.add_weights(add)
    shared.add_layout(add)
    shared.add_exchange(add)
    shared.add_compile_cache(add)
    shared.add_json(add)
