"""Arguments that several subcommands have."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import get_args

from sharding.names import Exchange, LayoutName


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Adds ``--layout``."""
    parser.add_argument(
        "--layout",
        choices=get_args(LayoutName),
        help="shard the model over all devices in this way: see docs/sharding.md (default: use"
        " the first device only)",
    )


def add_distributed(parser: argparse.ArgumentParser) -> None:
    """Adds ``--distributed``, for commands that run on several processes."""
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="join the other processes of a run on several hosts: see docs/multi_host.md",
    )


def add_exchange(parser: argparse.ArgumentParser) -> None:
    """Adds ``--exchange`` and ``--float8-dispatch``, for a layout that shards experts."""
    parser.add_argument(
        "--exchange",
        choices=get_args(Exchange),
        help="collective that brings tokens to experts on other devices; dsv3 doctor --collectives"
        " times them (default: all_gather)",
    )
    parser.add_argument(
        "--float8-dispatch",
        action="store_true",
        help="send tokens to experts on other devices in float8",
    )


def add_drafts(parser: argparse.ArgumentParser) -> None:
    """Adds ``--draft`` and ``--draft-depth``."""
    parser.add_argument(
        "--draft",
        default="none",
        metavar="DRAFTER",
        help="speculative decoding with mtp or ngram drafts; synthetic:RATE measures speed only"
        " and changes the text (default: none)",
    )
    parser.add_argument(
        "--draft-depth",
        default="1",
        metavar="N",
        help="number of tokens to draft in each step, 1 to 4, or auto (default: 1)",
    )


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Adds ``--dtype``, ``--quantization``, ``--activations`` and ``--cache-dtype``."""
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="dtype of weights and activations (default: bfloat16; float32 on a CPU)",
    )
    parser.add_argument(
        "--quantization",
        choices=["fp8", "int8", "int4"],
        help="keep weights in memory as stored: fp8 of a published checkpoint, or the integers of"
        " a store (default: dequantize them to --dtype)",
    )
    parser.add_argument(
        "--activations",
        choices=["float8"],
        help="with --quantization fp8 or int4: also round activations to float8 in large matmuls,"
        " with int4 those of experts",
    )
    add_cache_dtype(parser)


def add_cache_dtype(parser: argparse.ArgumentParser) -> None:
    """Adds ``--cache-dtype``."""
    parser.add_argument(
        "--cache-dtype",
        choices=["fp8", "fp8_index"],
        help="cache latents and indexer keys in float8, or with fp8_index indexer keys alone"
        " (default: the dtype of activations)",
    )


def add_workers(parser: argparse.ArgumentParser, items: str) -> None:
    """Adds ``--workers``, for passes over files.

    Args:
      items: plural of what each worker processes, for the help.
    """
    parser.add_argument(
        "--workers",
        type=int,
        default=min(8, os.cpu_count() or 1),
        metavar="N",
        help=f"number of {items} processed at once; more need more memory (default: number of"
        " cores, at most 8)",
    )


def add_compile_cache(parser: argparse.ArgumentParser) -> None:
    """Adds ``--compile-cache``."""
    parser.add_argument(
        "--compile-cache",
        type=Path,
        metavar="DIR",
        help="directory that keeps compiled programs between runs (default: ~/.cache/dsv3_jax/xla)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def add_latency_targets(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of latency targets."""
    parser.add_argument(
        "--target-ttft-ms",
        type=float,
        metavar="X",
        help="target of the time to the first token, of nine requests in ten (default: none)",
    )
    parser.add_argument(
        "--target-tpot-ms",
        type=float,
        metavar="X",
        help="target of the time between two tokens of a request (default: none)",
    )
