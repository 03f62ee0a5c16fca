"""Arguments that several subcommands have."""

from __future__ import annotations

import os
from typing import get_args

from dsv3_jax.cli.arguments.parser import Flags
from sharding.names import Exchange, LayoutName

MODEL = "demo, demo-sparse, a Hugging Face directory, a store, or a Hub name"
"""Help of a flag or argument that names a model."""


def add_layout(add: Flags) -> None:
    add.choice(
        "--layout",
        "shard the model over all devices in this way: see docs/sharding.md (default: use the"
        " first device only)",
        choices=get_args(LayoutName),
    )


def add_distributed(add: Flags) -> None:
    add.switch(
        "--distributed",
        "join the other processes of a run on several hosts: see docs/multi_host.md",
    )


def add_exchange(add: Flags) -> None:
    add.choice(
        "--exchange",
        "collective that brings tokens to experts on other devices; dsv3 doctor --collectives"
        " times them (default: all_gather)",
        choices=get_args(Exchange),
    )
    add.switch("--float8-dispatch", "send tokens to experts on other devices in float8")


def add_drafts(add: Flags) -> None:
    add.text(
        "--draft",
        "speculative decoding with mtp or ngram drafts; synthetic:RATE measures speed only and"
        " changes the text",
        "none",
        metavar="DRAFTER",
    )
    add.text(
        "--draft-depth", "number of tokens to draft in each step, 1 to 4, or auto", "1", metavar="N"
    )


def add_weights(add: Flags) -> None:
    add.choice(
        "--dtype",
        "dtype of weights and activations (default: bfloat16; float32 on a CPU)",
        choices=["bfloat16", "float32"],
    )
    add.choice(
        "--quantization",
        "keep weights in memory as stored: fp8 of a published checkpoint, or the integers of a"
        " store (default: dequantize them to --dtype)",
        choices=["fp8", "int8", "int4"],
    )
    add.choice(
        "--activations",
        "with --quantization fp8 or int4: also round activations to float8 in large matmuls,"
        " with int4 those of experts",
        choices=["float8"],
    )
    add_cache_dtype(add)


def add_cache_dtype(add: Flags) -> None:
    add.choice(
        "--cache-dtype",
        "cache latents and indexer keys in float8, or with fp8_index indexer keys alone"
        " (default: the dtype of activations)",
        choices=["fp8", "fp8_index"],
    )


def add_workers(add: Flags, items: str) -> None:
    """Adds ``--workers``, for passes over files. The help calls what a worker processes
    ``items``."""
    add.integer(
        "--workers",
        f"number of {items} processed at once; more need more memory (default: number of"
        " cores, at most 8)",
        default=min(8, os.cpu_count() or 1),
    )


def add_compile_cache(add: Flags) -> None:
    add.path(
        "--compile-cache",
        "directory that keeps compiled programs between runs (default: ~/.cache/dsv3_jax/xla)",
        metavar="DIR",
    )


def add_json(add: Flags) -> None:
    add.switch("--json", "print one JSON object on stdout")


def add_latency_targets(add: Flags) -> None:
    add.real(
        "--target-ttft-ms",
        "target of the time to the first token, of nine requests in ten (default: none)",
    )
    add.real(
        "--target-tpot-ms", "target of the time between two tokens of a request (default: none)"
    )
