"""Arguments of ``dsv3 train``."""

from __future__ import annotations

import argparse

from dsv3_jax.cli import flags, training_flags
from dsv3_jax.cli.arguments import shared
from dsv3_jax.cli.arguments.parser import Flags
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.settings import RunSettings

SUMMARY = "Train a model from scratch, or continue from a checkpoint."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = Flags(parser)
    source = Flags(parser.add_mutually_exclusive_group())
    source.text("--config", "config.json of a new model with random weights", metavar="JSON")
    source.text(
        "--from",
        "model to train further: demo, a Hugging Face directory, a store or a name on the Hub",
        dest="source",
        metavar="MODEL",
    )
    add.text(
        "--data",
        "text files, glob patterns or directories; or an .npz or .npy file of token ids",
        nargs="+",
        metavar="PATH",
    )
    add.text(
        "--tokenizer",
        "tokenizer.json or its directory (default: the model's, or the one next to --data)",
        metavar="PATH",
    )
    add.path("--out", "new directory for the run", required=True, metavar="DIR")
    add.switch(
        "--resume",
        "continue the run in --out with its recorded settings; only --steps may be raised",
    )
    shared.add_layout(add)
    shared.add_distributed(add)
    add.integer(
        "--expert-devices",
        "with --layout train: number of devices that share the experts (default: all devices)",
    )
    add.choice(
        "--to",
        "format of the trained model's weights in OUT/model (default: bf16)",
        choices=["bf16", "fp8", "float32"],
    )
    add.switch("--plot", "also plot OUT/loss.png and OUT/expert_load.png")
    shared.add_json(add)
    shared.add_compile_cache(add)
    flags.add_fields(parser, "run", RunSettings, training_flags.RUN_HELP, {})
    flags.add_fields(
        parser, "training", TrainingConfig, training_flags.TRAINING_HELP, training_flags.DEFAULTS
    )
