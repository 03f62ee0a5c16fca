"""Arguments of ``dsv3 plan``."""

from __future__ import annotations

import argparse
from typing import get_args

from dsv3_jax import presets
from dsv3_jax.cli import flags
from dsv3_jax.cli.arguments import shared
from dsv3_jax.cli.arguments.parser import Flags
from dsv3_jax.cli.arguments.train import TRAINING_HELP
from dsv3_jax.quantization import QUANTIZATIONS
from dsv3_jax.training.config import TrainingConfig
from sharding.names import Exchange, LayoutName

SUMMARY = "Calculate memory use and the best possible speed of a model, without having the devices."


_LAYOUTS = tuple(name for name in get_args(LayoutName) if name != "train")

_SCHEDULES = (
    *("steps", "learning_rate", "final_learning_rate", "warmup_steps", "decay_start", "decay_end"),
    *("betas", "weight_decay", "clip_norm", "mtp_weight", "final_mtp_weight", "mtp_weight_switch"),
    *("mtp_hidden", "balance_weight", "bias_update_speed", "bias_update_end"),
    *("lora_alpha", "lora_seed"),
)
"""Fields of TrainingConfig that the memory of a step does not depend on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = Flags(parser)
    add.text(
        "--model",
        "demo, demo-sparse, a Hugging Face directory, a store, or one of "
        f"{', '.join(presets.PRESETS)}, or their names on the Hub, such as deepseek-ai/DeepSeek-V3",
        required=True,
    )
    add.text(
        "--target",
        "kind and number of GPUs, such as h200x8, or chips of a TPU slice, such as v5p:4x4x8;"
        " names of NVIDIA, Google Cloud and others are read too, such as 8xH200, 'DGX H100' or"
        " v5p-128",
        required=True,
    )
    add.choice(
        "--layout",
        "sharding of the model: see docs/sharding.md (default: the fastest that fits; with --train"
        " train, or on one device single)",
        choices=get_args(LayoutName),
    )
    add.integer(
        "--batch",
        "number of sequences on all devices together; with --serve, the most that run at a time"
        " (the Engine's max_running) (default: 64, or the next multiple of the devices)",
        metavar="B",
    )
    add.integer(
        "--context",
        "tokens of each sequence; with --serve, the most (the Engine's max_len) (default: 4096,"
        " or what the model has positions for)",
        metavar="S",
    )
    add.switch(
        "--serve",
        "plan an Engine, in which requests join and leave a running batch, instead of a Generator",
    )
    add.integer(
        "--cache-tokens",
        "with --serve: tokens in the cache of all requests (default: what the Engine takes)",
    )
    add.choice("--quantization", "format of the weights", "bf16", choices=tuple(QUANTIZATIONS))
    add.switch(
        "--mtp",
        "draft one token per step with the MTP layer, and assume that it is always accepted",
    )
    shared.add_cache_dtype(add)
    chosen = Flags(
        parser.add_argument_group(
            "settings that are chosen together with the layout",
            "Without --layout, those that are not given are chosen too. With --layout they have the"
            " defaults below.",
        )
    )
    chosen.choice(
        "--activations",
        "dtype of activations in matmuls; float8 needs --quantization fp8, or int4, whose"
        " experts take it (default: bf16)",
        choices=("float8", "bf16"),
    )
    chosen.choice(
        "--exchange",
        "collective that brings tokens to experts on other devices (default: all_gather)",
        choices=get_args(Exchange),
    )
    chosen.argument(
        "--float8-dispatch",
        action=argparse.BooleanOptionalAction,
        help="send tokens to experts in float8 (default: no)",
    )
    chosen.integer(
        "--redundant-experts",
        "expert replicas per layer, besides one of each expert (default: 0; 32 in the layouts"
        " that DeepSeek published)",
    )
    chosen.integer(
        "--prefill-chunk",
        "prompt tokens of each sequence per pass (default: 512; without --layout fewer where"
        " 512 do not fit); with --serve, tokens of a chunk (default: 64 on Hopper GPUs, 256 on"
        " others and on TPUs)",
        metavar="T",
    )
    add.switch(
        "--compile",
        "also compile the whole model for the target, without its devices, and print the"
        " compiler's memory use; takes minutes",
    )
    add.path(
        "--sweep",
        "also vary the batch size: print and plot tokens/s per device against tokens/s per user"
        " (.png, .svg or .pdf)",
    )
    _add_training(parser)
    _add_simulation(parser)
    shared.add_json(add)


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "training",
        "With --train, the plan is for a training step of --batch sequences (default: 8, or the"
        " next multiple of the devices) of --context tokens. Flags as in dsv3 train.",
    )
    Flags(group).switch("--train", "plan training instead of serving")
    Flags(group).integer(
        "--expert-devices",
        "with --layout train: number of devices that share the experts (default: all devices)",
    )
    Flags(group).integer(
        "--context-devices",
        "with --layout train: number of devices that share each sequence (default: 1)",
    )
    described = {name: text for name, text in TRAINING_HELP.items() if name not in _SCHEDULES}
    flags.add_fields(parser, "of a training step", TrainingConfig, described, {})


def _add_simulation(parser: argparse.ArgumentParser) -> None:
    add = Flags(
        parser.add_argument_group(
            "simulation",
            "With --serve and --trace, the engine's scheduler runs under simulated time. --batch"
            " counts the slots of a replica.",
        )
    )
    add.choice(
        "--trace",
        "simulate these requests: a trace of docs/benchmarks.md, or Poisson arrivals with"
        " log-normal lengths",
        choices=("chat", "prefixed", "poisson"),
    )
    add.real("--rate", "requests per second (default: all at once)", metavar="R")
    add.integer("--requests", "number of requests of a trace (default: all)")
    add.real(
        "--seconds",
        "with --trace poisson: simulated time (default: 300); its first third is not measured",
        default=300.0,
    )
    add.real("--mean-prompt", "with --trace poisson: mean prompt tokens", 1000.0, metavar="T")
    add.real("--mean-output", "with --trace poisson: mean output tokens", 300.0, metavar="T")
    add.integer("--replicas", "number of replicas", 1)
    add.text(
        "--prefill-target",
        "compute prompts in a pool of its own, on these devices; --target then only decodes",
        metavar="TARGET",
    )
    add.choice("--prefill-layout", "layout of that pool (default: --layout)", choices=_LAYOUTS)
    add.integer("--prefill-replicas", "replicas of that pool", 1)
    add.real("--hit-share", "share of each prompt whose cache comes from disk", 0.0)
    add.real("--acceptance", "with --mtp: probability that a draft is accepted", 0.85)
    add.real(
        "--reached",
        "shares of the peak rates that programs reach (default: 1 1 1, a bound)",
        nargs=3,
        default=(1.0, 1.0, 1.0),
        metavar=("MEMORY", "ARITHMETIC", "NETWORK"),
    )
    add.path(
        "--step-times",
        "take step times from a result of scripts/bench_engine.py, its chat replay at 24"
        " requests per second; its GPU, model and buckets must be those of the plan",
    )
    shared.add_latency_targets(Flags(parser))
    add.switch(
        "--control",
        "let the engines' controller keep these targets; otherwise they are only compared",
    )
