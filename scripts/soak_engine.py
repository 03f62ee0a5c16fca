"""Runs the serving engine at full load for a given time, and fails if anything grows.

    python -m scripts.soak_engine --model demo --seconds 3600 --out soak.json
    python -m scripts.soak_engine --model moonlight-16b --max-running 512 --max-len 5120 \\
        --request-tokens 1024 --cache-tokens device

The load is random: long and short prompts that partly begin alike, sampled and greedy tokens,
cancellations, time limits, and more requests than the cache has room for. Host and device memory,
Python objects, handles, arrays, threads and pages are counted after each round, which ends when its
last request has ended: shorter requests (``--request-tokens``) leave more of the time at full load.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks import machine
from benchmarks.decode import models
from dsv3_jax.engine import Engine
from dsv3_jax.files import atomic_write
from scripts.bench_engine import load
from tests.engine.soak import growth, soak


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the engine at full load; fail on growth.")
    parser.add_argument("--model", default="demo", help=f"demo, {models.HELP}")
    parser.add_argument("--weights", default="bf16", choices=models.WEIGHTS)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rounds", type=int, default=6, help="counts in this time; at least 3")
    parser.add_argument("--max-running", type=int, default=16)
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--request-tokens", type=int, help="most of a request; default --max-len")
    parser.add_argument(
        "--cache-tokens",
        type=_cache_tokens,
        default=4096,
        help="less than requests need; 'device' for what fits",
    )
    parser.add_argument("--store", type=Path, help="directory of the engine's stored programs")
    parser.add_argument("--draft", choices=("mtp", "ngram"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    if arguments.rounds < 3:
        parser.error(f"--rounds: expected at least 3, got {arguments.rounds}")
    if arguments.request_tokens is None:
        arguments.request_tokens = arguments.max_len
    if not 4 <= arguments.request_tokens <= arguments.max_len:
        parser.error(
            f"--request-tokens: expected 4 to --max-len, {arguments.max_len},"
            f" got {arguments.request_tokens}"
        )
    return arguments


def _cache_tokens(word: str) -> int | None:
    if word != "device" and not word.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of tokens or 'device', got {word!r}")
    return None if word == "device" else int(word)


def main(words: Sequence[str]) -> int:
    arguments = parse(words)
    model = load(arguments.model, arguments.weights)
    with Engine(
        model,
        None,
        arguments.max_len,
        max_running=arguments.max_running,
        cache_tokens=arguments.cache_tokens,
        draft=arguments.draft,
        max_waiting=64,
    ) as engine:
        engine.warm_up(arguments.store)
        counts = soak(
            engine,
            arguments.seconds,
            vocab_size=model.config.vocab_size,
            max_len=arguments.request_tokens,
            rounds=arguments.rounds,
        )
        stats = engine.stats()
    grown = growth(counts)
    result = {
        **machine.description(),
        "cores": os.cpu_count(),
        "model": arguments.model,
        "command": f"python -m scripts.soak_engine {' '.join(words)}",
        "seconds": arguments.seconds,
        "cache_tokens": stats.cache_tokens,
        "peak_device_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "preemptions": stats.preemptions,
        "compiled_after_warm_up": stats.compiled_after_warm_up,
        "grown": grown,
        "counts": [dataclasses.asdict(count) for count in counts],
    }
    if arguments.out:
        atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    for line in grown:
        print(line, file=sys.stderr)
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
