"""Arguments of ``dsv3 doctor``."""

from __future__ import annotations

import argparse

SUMMARY = "Say what this machine has and which back-ends work on it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--collectives",
        action="store_true",
        help="also time how tokens reach experts on other devices",
    )
