"""Arguments of ``dsv3 train``."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv3_jax.cli import flags, training_flags
from dsv3_jax.cli.arguments import shared
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.settings import RunSettings

SUMMARY = "Train a model: from scratch, or on from a checkpoint."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--config", metavar="JSON", help="config.json of a model to begin at random"
    )
    source.add_argument(
        "--from", dest="source", metavar="MODEL", help="demo, a directory, a store, or a Hub name"
    )
    add(
        "--data",
        nargs="+",
        metavar="PATH",
        help="an .npz or .npy of token ids; or text files, patterns, directories",
    )
    add(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json or its directory (default: the model's, or the one beside --data)",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="a new directory for the run")
    add(
        "--resume",
        action="store_true",
        help="go on with the run in --out, which knows its settings; only --steps may grow",
    )
    shared.add_layout(parser, default="the first device")
    add("--expert-devices", type=int, metavar="N", help="of --layout train (default: all devices)")
    add("--to", choices=["bf16", "fp8", "float32"], help="type of OUT/model (default: bf16)")
    add("--plot", action="store_true", help="draw OUT/loss.png and OUT/expert_load.png")
    add("--json", action="store_true", help="one JSON object on stdout at the end")
    shared.add_compile_cache(parser)
    flags.add_fields(parser, "run", RunSettings, training_flags.RUN, {})
    flags.add_fields(
        parser, "training", TrainingConfig, training_flags.TRAINING, training_flags.DEFAULTS
    )
