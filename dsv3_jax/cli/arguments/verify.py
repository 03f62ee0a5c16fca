"""Arguments of ``dsv3 verify``."""

from __future__ import annotations

import argparse

from dsv3_jax.cli.arguments import shared
from dsv3_jax.cli.arguments.parser import Flags

SUMMARY = "Check every value of a checkpoint, or compare two checkpoints."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = Flags(parser)
    add.text(
        "a", "demo, demo-sparse, a Hugging Face directory, a store, or a Hub name", metavar="A"
    )
    add.text("b", "another checkpoint of the same model, in any format", metavar="B", nargs="?")
    add.switch("--equal", "with B: report any difference as an error")
    add.path(
        "--plot", "plot weights and scales by layer, with B their differences (.png, .svg or .pdf)"
    )
    shared.add_workers(add, "tensors")
    shared.add_json(add)
