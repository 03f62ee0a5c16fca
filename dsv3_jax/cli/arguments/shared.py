"""Arguments that several subcommands have."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import get_args

from sharding.names import Exchange, LayoutName


def add_layout(parser: argparse.ArgumentParser, default: str) -> None:
    """``--layout`` and ``--distributed``."""
    parser.add_argument(
        "--layout", choices=get_args(LayoutName), help=f"over all devices (default: {default})"
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="one of several processes: see docs/multi_host.md",
    )


def add_exchange(parser: argparse.ArgumentParser) -> None:
    """``--exchange``, of a layout that spreads experts."""
    parser.add_argument(
        "--exchange",
        choices=get_args(Exchange),
        help="how tokens get to other devices' experts: see dsv3 doctor --collectives"
        " (default: all_gather)",
    )


def add_workers(parser: argparse.ArgumentParser, of: str) -> None:
    """``--workers N`` for passes over files."""
    parser.add_argument(
        "--workers",
        type=int,
        default=min(8, os.cpu_count() or 1),
        metavar="N",
        help=f"{of} at once: memory grows with them (default: cores, 8 at most)",
    )


def add_compile_cache(parser: argparse.ArgumentParser) -> None:
    """``--compile-cache DIR``."""
    parser.add_argument(
        "--compile-cache", type=Path, metavar="DIR", help="default: ~/.cache/dsv3_jax/xla"
    )
