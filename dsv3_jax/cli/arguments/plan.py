"""Arguments of ``dsv3 plan``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from dsv3_jax import presets
from dsv3_jax.cli.arguments import shared
from dsv3_jax.quantization import QUANTIZATIONS
from sharding.names import Exchange, LayoutName

SUMMARY = "Calculate memory use and the best possible speed of a model, without having the devices."


_LAYOUTS = tuple(name for name in get_args(LayoutName) if name != "train")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to the subcommand's parser."""
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="demo, demo-sparse, a Hugging Face directory, a store, or one of "
        f"{', '.join(presets.PRESETS)}, or their names on the Hub, such as deepseek-ai/DeepSeek-V3",
    )
    add(
        "--target",
        required=True,
        help="kind and number of GPUs, such as h200x8, or chips of a TPU slice, such as v5p:4x4x8;"
        " names of NVIDIA, Google Cloud and others are read too, such as 8xH200, 'DGX H100' or"
        " v5p-128",
    )
    add(
        "--layout",
        choices=_LAYOUTS,
        help="sharding of the model: see docs/sharding.md (default: the fastest that fits)",
    )
    add(
        "--batch",
        type=int,
        metavar="B",
        help="number of sequences on all devices together; with --serve, the most that run at a"
        " time (the Engine's max_running) (default: 64, or the next multiple of the devices)",
    )
    add(
        "--context",
        type=int,
        metavar="S",
        help="tokens of each sequence; with --serve, the most (the Engine's max_len) (default:"
        " 4096, or what the model has positions for)",
    )
    add(
        "--serve",
        action="store_true",
        help="plan an Engine, in which requests join and leave a running batch, instead of a"
        " Generator",
    )
    add(
        "--cache-tokens",
        type=int,
        metavar="N",
        help="with --serve: tokens in the cache of all requests (default: what the Engine takes)",
    )
    add(
        "--quantization",
        choices=tuple(QUANTIZATIONS),
        default="bf16",
        help="format of the weights (default: bf16)",
    )
    add(
        "--mtp",
        action="store_true",
        help="draft one token per step with the MTP layer, and assume that it is always accepted",
    )
    shared.add_cache_dtype(parser)
    chosen = parser.add_argument_group(
        "settings that are chosen together with the layout",
        "Without --layout, those that are not given are chosen too. With --layout they have the"
        " defaults below.",
    ).add_argument
    chosen(
        "--activations",
        choices=("float8", "bf16"),
        help="dtype of activations in matmuls; float8 needs --quantization fp8, or int4, whose"
        " experts take it (default: bf16)",
    )
    chosen(
        "--exchange",
        choices=get_args(Exchange),
        help="collective that brings tokens to experts on other devices (default: all_gather)",
    )
    chosen(
        "--float8-dispatch",
        action=argparse.BooleanOptionalAction,
        help="send tokens to experts in float8 (default: no)",
    )
    chosen(
        "--redundant-experts",
        type=int,
        metavar="N",
        help="expert replicas per layer, besides one of each expert (default: 0; 32 in the layouts"
        " that DeepSeek published)",
    )
    chosen(
        "--prefill-chunk",
        type=int,
        metavar="T",
        help="prompt tokens of each sequence per pass (default: 512; without --layout fewer where"
        " 512 do not fit); with --serve, tokens of a chunk (default: 64 on"
        " Hopper GPUs, 256 on others and on TPUs)",
    )
    add(
        "--compile",
        action="store_true",
        help="also compile the whole model for the target, without its devices, and print the"
        " compiler's memory use; takes minutes",
    )
    add(
        "--sweep",
        type=Path,
        metavar="FILE",
        help="also vary the batch size: print and plot tokens/s per device against tokens/s per"
        " user (.png, .svg or .pdf)",
    )
    _add_simulation(parser)
    shared.add_json(parser)


def _add_simulation(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "simulation",
        "With --serve and --trace, the engine's scheduler runs under simulated time. --batch counts"
        " the slots of a replica.",
    ).add_argument
    add(
        "--trace",
        choices=("chat", "prefixed", "poisson"),
        help="simulate these requests: a trace of docs/benchmarks.md, or Poisson arrivals with"
        " log-normal lengths",
    )
    add("--rate", type=float, metavar="R", help="requests per second (default: all at once)")
    add("--requests", type=int, metavar="N", help="number of requests of a trace (default: all)")
    add(
        "--seconds",
        type=float,
        default=300.0,
        metavar="X",
        help="with --trace poisson: simulated time (default: 300); its first third is not measured",
    )
    add(
        "--mean-prompt",
        type=float,
        default=1000.0,
        metavar="T",
        help="with --trace poisson: mean prompt tokens (default: 1000)",
    )
    add(
        "--mean-output",
        type=float,
        default=300.0,
        metavar="T",
        help="with --trace poisson: mean output tokens (default: 300)",
    )
    add("--replicas", type=int, default=1, metavar="N", help="number of replicas (default: 1)")
    add(
        "--prefill-target",
        metavar="TARGET",
        help="compute prompts in a pool of its own, on these devices; --target then only decodes",
    )
    add("--prefill-layout", choices=_LAYOUTS, help="layout of that pool (default: --layout)")
    add(
        "--prefill-replicas",
        type=int,
        default=1,
        metavar="N",
        help="replicas of that pool (default: 1)",
    )
    add(
        "--hit-share",
        type=float,
        default=0.0,
        metavar="X",
        help="share of each prompt whose cache comes from disk (default: 0)",
    )
    add(
        "--acceptance",
        type=float,
        default=0.85,
        metavar="X",
        help="with --mtp: probability that a draft is accepted (default: 0.85)",
    )
    add(
        "--reached",
        type=float,
        nargs=3,
        default=(1.0, 1.0, 1.0),
        metavar=("MEMORY", "ARITHMETIC", "NETWORK"),
        help="shares of the peak rates that programs reach (default: 1 1 1, a bound)",
    )
    add(
        "--step-times",
        type=Path,
        metavar="FILE",
        help="take step times from a result of scripts/bench_engine.py, its chat replay at 24"
        " requests per second; its GPU, model and buckets must be those of the plan",
    )
    shared.add_latency_targets(parser)
    add(
        "--control",
        action="store_true",
        help="let the engines' controller keep these targets; otherwise they are only compared",
    )
