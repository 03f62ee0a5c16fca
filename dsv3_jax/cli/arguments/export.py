"""Arguments of ``dsv3 export``."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv3_jax.cli.arguments import shared

SUMMARY = "Write a store, or a checkpoint of a training run, as a Hugging Face directory."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = parser.add_argument
    add(
        "source",
        type=Path,
        metavar="STORE|RUN_DIR",
        help="store written by dsv3 convert, or run directory written by dsv3 train",
    )
    add("hf_directory", type=Path, metavar="HF_DIR", help="new directory to write")
    add("--step", type=int, metavar="N", help="checkpoint of a training run (default: the last)")
    add(
        "--to",
        choices=["bf16", "fp8", "float32"],
        help="format of the weights; float32 only for a training run (default: the format of the"
        " store; bf16 for a training run or a store of integers)",
    )
    shared.add_workers(parser, "shards of a store")
    shared.add_json(parser)
