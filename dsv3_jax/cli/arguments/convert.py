"""Arguments of ``dsv3 convert``."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv3_jax.cli.arguments import shared
from dsv3_jax.quantization import QUANTIZATIONS

SUMMARY = "Convert a published checkpoint to a store: streamed, resumable, verified."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SRC", help="demo, a directory as published, or a Hub name")
    add("destination", type=Path, metavar="DST", help="a new directory")
    add(
        "--to",
        choices=tuple(QUANTIZATIONS),
        default="fp8",
        help="form of the weights (default: fp8)",
    )
    add("--resume", action="store_true", help="go on with what an earlier run left unfinished")
    add("--dry-run", action="store_true", help="check the headers, say what would be done")
    shared.add_workers(parser, "tensors")
    add("--json", action="store_true", help="one JSON object on stdout")
