"""Arguments of ``dsv3 export``."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv3_jax.cli.arguments import shared

SUMMARY = "Write a store, or a checkpoint of a training run, as a Hugging Face directory."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="STORE|RUN_DIR", help="what dsv3 convert or dsv3 train made")
    add("hf_directory", type=Path, metavar="HF_DIR", help="a new directory")
    add("--step", type=int, metavar="N", help="of a run's checkpoint (default: the last)")
    add(
        "--to",
        choices=["bf16", "fp8", "float32"],
        help="default: a store's own form, bf16 of integers and of a run; float32: of a run only",
    )
    shared.add_workers(parser, "shards of a store")
    add("--json", action="store_true", help="one JSON object on stdout")
