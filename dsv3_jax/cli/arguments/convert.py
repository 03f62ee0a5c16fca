"""Arguments of ``dsv3 convert``."""

from __future__ import annotations

import argparse

from dsv3_jax.cli.arguments import shared
from dsv3_jax.cli.arguments.parser import Flags
from dsv3_jax.quantization import QUANTIZATIONS

SUMMARY = "Convert a published checkpoint to a store of bf16, fp8, int8 or int4 weights; resumable."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = Flags(parser)
    add.text("source", "demo, demo-sparse, a Hugging Face directory, or a Hub name", metavar="SRC")
    add.path("destination", "new directory for the store", metavar="DST")
    add.choice("--to", "format of the weights", "fp8", choices=tuple(QUANTIZATIONS))
    add.switch("--resume", "continue an unfinished conversion to DST")
    add.switch("--dry-run", "read only the headers and print the plan")
    shared.add_workers(add, "tensors")
    shared.add_json(add)
