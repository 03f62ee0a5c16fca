"""Arguments of ``dsv3 convert``, ``verify`` and ``export``."""

from __future__ import annotations

import argparse

from dsv3_jax.cli.arguments import shared
from dsv3_jax.cli.arguments.parser import Flags
from dsv3_jax.quantization import QUANTIZATIONS


def add_convert(parser: argparse.ArgumentParser) -> None:
    add = Flags(parser)
    add.text("source", "demo, demo-sparse, a Hugging Face directory, or a Hub name", metavar="SRC")
    add.path("destination", "new directory for the store", metavar="DST")
    add.choice("--to", "format of the weights", "fp8", choices=tuple(QUANTIZATIONS))
    add.switch("--resume", "continue an unfinished conversion to DST")
    add.switch("--dry-run", "read only the headers and print the plan")
    shared.add_workers(add, "tensors")
    shared.add_json(add)


def add_verify(parser: argparse.ArgumentParser) -> None:
    add = Flags(parser)
    add.text("a", shared.MODEL, metavar="A")
    add.text("b", "another checkpoint of the same model, in any format", metavar="B", nargs="?")
    add.switch("--equal", "with B: report any difference as an error")
    add.path(
        "--plot", "plot weights and scales by layer, with B their differences (.png, .svg or .pdf)"
    )
    shared.add_workers(add, "tensors")
    shared.add_json(add)


def add_export(parser: argparse.ArgumentParser) -> None:
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
