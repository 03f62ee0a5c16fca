"""Arguments of ``dsv3 convert``."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv3_jax.cli.arguments import shared
from dsv3_jax.quantization import QUANTIZATIONS

SUMMARY = "Convert a published checkpoint to a store of bf16, fp8, int8 or int4 weights; resumable."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = parser.add_argument
    add(
        "source",
        metavar="SRC",
        help="demo, demo-sparse, a Hugging Face directory, or a Hub name",
    )
    add("destination", type=Path, metavar="DST", help="new directory for the store")
    add(
        "--to",
        choices=tuple(QUANTIZATIONS),
        default="fp8",
        help="format of the weights (default: fp8)",
    )
    add("--resume", action="store_true", help="continue an unfinished conversion to DST")
    add("--dry-run", action="store_true", help="read only the headers and print the plan")
    shared.add_workers(parser, "tensors")
    shared.add_json(parser)
