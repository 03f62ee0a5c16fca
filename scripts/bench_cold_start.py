"""Measures the time from a process's start to its first token, with a cold and a warm cache.

    python -m scripts.bench_cold_start --model moonlight-16b --layers 27 61 \\
        --out benchmarks/results/cold_start_h200.json

For each number of layers two processes run one after the other. The first starts with an empty
compilation cache, the second with the one that the first has filled. ``weights`` is the time to
generate random weights on the device, in place of loading a checkpoint. ``programs`` is everything
else up to the first token: tracing, compiling and running the programs of a batch of one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.decode import models
from dsv3_jax.cli import allocator
from dsv3_jax.files import atomic_write


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the time to the first token.")
    parser.add_argument("--model", default="moonlight-16b", help=models.HELP)
    parser.add_argument("--weights", default="bf16", choices=models.WEIGHTS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--layers", nargs="+", type=int, help="instead of the model's own number")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def first_token(arguments: argparse.Namespace, layers: int, cache: str) -> dict[str, Any]:
    """Runs :mod:`benchmarks.decode.first_token` in a new process, and returns its result."""
    words = [arguments.model, arguments.weights, arguments.dtype, layers, arguments.prompt, cache]
    command = [sys.executable, "-m", "benchmarks.decode.first_token", time.time(), *words]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{arguments.model} of {layers} layers: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def line(row: dict[str, Any]) -> str:
    parts = (row["phases_s"] | row["of_programs_s"]).items()
    return (
        f"{row['model']} {row['dtype']}, {row['layers']} layers, {row['cache']}:"
        f" {row['first_token_s']:.1f} s ("
        + ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts)
        + f"), again in {row['second_call_s']:.3f} s"
    )


def main() -> None:
    allocator.configure("generate")  # as a command that runs a model
    arguments = parse(sys.argv[1:])
    try:
        own = models.config(arguments.model).num_hidden_layers
    except ValueError as error:
        raise SystemExit(str(error)) from None
    result: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for layers in arguments.layers or [own]:
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                row = {"model": arguments.model, "dtype": arguments.weights, "cache": state}
                row |= first_token(arguments, layers, cache)
                result |= row.pop("machine")
                rows.append(row)
                print(line(row), flush=True)
                if out := arguments.out:
                    out.parent.mkdir(parents=True, exist_ok=True)
                    atomic_write(out, json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
