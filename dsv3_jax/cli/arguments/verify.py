"""Arguments of ``dsv3 verify``."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv3_jax.cli.arguments import shared

SUMMARY = "Check every value of a checkpoint, or compare two checkpoints."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = parser.add_argument
    add(
        "a",
        metavar="A",
        help="demo, demo-sparse, a Hugging Face directory, a store, or a Hub name",
    )
    add("b", metavar="B", nargs="?", help="another checkpoint of the same model, in any format")
    add("--equal", action="store_true", help="with B: report any difference as an error")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="plot weights and scales by layer, with B their differences (.png, .svg or .pdf)",
    )
    shared.add_workers(parser, "tensors")
    shared.add_json(parser)
