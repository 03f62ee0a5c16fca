"""Arguments of ``dsv3 plan``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from dsv3_jax import presets
from dsv3_jax.quantization import QUANTIZATIONS
from sharding.names import Exchange, LayoutName

SUMMARY = "Say what a model needs on given devices, what fits, and how fast it could be."


MODELS = tuple(name for name, config in presets.PRESETS.items() if config.index_topk is None)
"""Presets that the model can be built for. It has no sparse attention, as DeepSeek-V3.2 needs."""

_LAYOUTS = tuple(name for name in get_args(LayoutName) if name != "train")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help=f"demo, a directory, a store, or one of {', '.join(MODELS)}")
    add(
        "--target",
        required=True,
        help="GPUs, such as h200x8, or chips of a TPU slice, such as v5p:4x4x8",
    )
    add("--layout", choices=_LAYOUTS, help="default: the fastest that fits")
    add("--batch", type=int, required=True, metavar="B", help="rows of all devices")
    add("--context", type=int, required=True, metavar="S", help="tokens of a row")
    add("--quantization", choices=tuple(QUANTIZATIONS), default="bf16", help="default: bf16")
    add("--mtp", action="store_true", help="the MTP layer drafts a token a step, and all hold")
    chosen = parser.add_argument_group(
        "chosen with the layout, where neither it nor they are given"
    ).add_argument
    chosen(
        "--activations",
        choices=("float8", "bf16"),
        help="with --layout: bf16. float8 needs --quantization fp8: see generate",
    )
    chosen("--exchange", choices=get_args(Exchange), help="with --layout: all_gather")
    chosen(
        "--float8-dispatch",
        action=argparse.BooleanOptionalAction,
        help="tokens travel to experts in float8; with --layout: no",
    )
    chosen(
        "--redundant-experts",
        type=int,
        metavar="N",
        help="replicas beside one of each expert; with --layout: what its published deployment has",
    )
    chosen(
        "--prefill-chunk",
        type=int,
        metavar="T",
        help="prompt tokens a row at a time; with --layout: 512, else less where 512 do not fit",
    )
    add(
        "--compile",
        action="store_true",
        help="compile every layer for the target, which need not be here: the compiler's peaks"
        " beside the formula's, and the kernels in the programs; takes minutes",
    )
    add(
        "--sweep",
        type=Path,
        metavar="FILE",
        help="also tokens/s a device against tokens/s a user over batches: a table, and a picture"
        " (.png, .svg or .pdf)",
    )
    add("--json", action="store_true", help="one JSON object on stdout")
