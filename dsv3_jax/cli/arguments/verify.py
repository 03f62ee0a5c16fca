"""Arguments of ``dsv3 verify``."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv3_jax.cli.arguments import shared

SUMMARY = "Check every value of a checkpoint, or compare two."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("a", metavar="A", help="demo, a Hugging Face directory, a store, or a Hub name")
    add("b", metavar="B", nargs="?", help="another checkpoint of the same model, in any form")
    add("--equal", action="store_true", help="with B: any difference is an error")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw weights and scales, or differences, by layer (.png, .svg or .pdf)",
    )
    shared.add_workers(parser, "tensors")
    add("--json", action="store_true", help="one JSON object on stdout")
