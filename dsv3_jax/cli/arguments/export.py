"""Arguments of ``dsv3 export``."""

from __future__ import annotations

import argparse

from dsv3_jax.cli.arguments import shared
from dsv3_jax.cli.arguments.parser import Flags

SUMMARY = "Write a store, or a checkpoint of a training run, as a Hugging Face directory."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = Flags(parser)
    add.path(
        "source",
        "store written by dsv3 convert, or run directory written by dsv3 train",
        metavar="STORE|RUN_DIR",
    )
    add.path("hf_directory", "new directory to write", metavar="HF_DIR")
    add.integer("--step", "checkpoint of a training run (default: the last)")
    add.choice(
        "--to",
        "format of the weights; float32 only for a training run (default: the format of the"
        " store; bf16 for a training run or a store of integers)",
        choices=["bf16", "fp8", "float32"],
    )
    shared.add_workers(add, "shards of a store")
    shared.add_json(add)
