"""Arguments of ``dsv3 doctor``."""

from __future__ import annotations

import argparse

from dsv3_jax.cli.arguments import shared
from dsv3_jax.cli.arguments.parser import Flags

SUMMARY = "Report this machine's versions, devices, and which kernels work on it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = Flags(parser)
    shared.add_json(add)
    add.switch(
        "--collectives",
        "also time each --exchange, which brings tokens to experts on other devices",
    )
