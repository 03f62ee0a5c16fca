"""Arguments of ``dsv3 train``."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsv3_jax.cli import flags, training_flags
from dsv3_jax.cli.arguments import shared
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.settings import RunSettings

SUMMARY = "Train a model from scratch, or continue from a checkpoint."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--config", metavar="JSON", help="config.json of a new model with random weights"
    )
    source.add_argument(
        "--from",
        dest="source",
        metavar="MODEL",
        help="model to train further: demo, a Hugging Face directory, a store or a name on the Hub",
    )
    add(
        "--data",
        nargs="+",
        metavar="PATH",
        help="text files, glob patterns or directories; or an .npz or .npy file of token ids",
    )
    add(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json or its directory (default: the model's, or the one next to --data)",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="new directory for the run")
    add(
        "--resume",
        action="store_true",
        help="continue the run in --out with its recorded settings; only --steps may be raised",
    )
    shared.add_layout(parser)
    shared.add_distributed(parser)
    add(
        "--expert-devices",
        type=int,
        metavar="N",
        help="with --layout train: number of devices that share the experts (default: all devices)",
    )
    add(
        "--to",
        choices=["bf16", "fp8", "float32"],
        help="format of the trained model's weights in OUT/model (default: bf16)",
    )
    add("--plot", action="store_true", help="also plot OUT/loss.png and OUT/expert_load.png")
    shared.add_json(parser)
    shared.add_compile_cache(parser)
    flags.add_fields(parser, "run", RunSettings, training_flags.RUN_HELP, {})
    flags.add_fields(
        parser, "training", TrainingConfig, training_flags.TRAINING_HELP, training_flags.DEFAULTS
    )
