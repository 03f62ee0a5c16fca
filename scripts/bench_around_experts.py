"""Times the operations around a layer's routed experts on a GPU, with every back-end.

    python -m scripts.bench_around_experts --out benchmarks/results/around_experts_h200.json

``gather_rows`` copies each token for its six experts, and ``swiglu`` is the first half of the
shared experts; both have Moonlight's widths, in bfloat16. ``us`` is the time per call, from
programs of several calls with several programs in flight: the median of the windows, and their
spread. Results are compared with the reference before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode.machine import description
from dsv3_jax.files import atomic_write
from pallas_kernels import gather_rows, swiglu

WIDTH, HIDDEN, EXPERTS = 2048, 2816, 6
TOKENS = 96, 128, 256, 384, 512, 1024, 2560
CALLS = 8  # of a program, with inputs of their own
WINDOWS, WINDOW_S = 7, 0.03
BACKENDS = {
    "gather_rows": ("mosaic_gpu", "reference"),
    "swiglu": ("mosaic_gpu", "separate", "reference"),
}
TOLERANCE = 2.0**-6  # of the largest number: some roundings to bfloat16


def calls(op: str, tokens: int, implementation: str) -> tuple[Callable[..., Any], list[Any]]:
    """Returns a program of several calls, and its arguments."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32), jnp.bfloat16)

    if op == "gather_rows":
        pairs = [random.permutation(tokens * EXPERTS) // EXPERTS for _ in range(CALLS)]
        sets = [(normal(tokens, WIDTH), jnp.asarray(rows, jnp.int32)) for rows in pairs]
        function: Callable[..., Any] = gather_rows
    else:
        matrices = [normal(HIDDEN, WIDTH) / 45 for _ in range(2 * CALLS)]
        sets = [(normal(tokens, WIDTH), *matrices[2 * i :][:2]) for i in range(CALLS)]
        function = swiglu
    return lambda sets: [function(*a, implementation=implementation) for a in sets], sets


def windows(program: Callable[..., Any], arguments: Any) -> Iterator[float]:
    """Yields the microseconds per call of a compiled program in each window."""
    jax.block_until_ready(program(arguments))
    began = time.perf_counter()
    jax.block_until_ready(program(arguments))
    count = max(2, int(WINDOW_S / (time.perf_counter() - began)))
    for _ in range(WINDOWS):
        began = time.perf_counter()
        jax.block_until_ready([program(arguments) for _ in range(count)])
        yield (time.perf_counter() - began) / count / CALLS * 1e6


def measure(op: str, tokens: int) -> dict[str, Any]:
    """Returns the times of each back-end that takes the arguments."""
    run, arguments = calls(op, tokens, "reference")
    wanted = [np.asarray(x, np.float32) for x in jax.jit(run)(arguments)]
    entry: dict[str, Any] = {"op": op, "tokens": tokens}
    for name in BACKENDS[op]:
        run, _ = calls(op, tokens, name)
        program = jax.jit(run)
        try:
            results = program(arguments)
        except NotImplementedError:
            continue  # the dispatch skips it, too
        for got, want in zip(results, wanted, strict=True):
            error = np.abs(np.asarray(got, np.float32) - want).max() / np.abs(want).max()
            if not error <= TOLERANCE:
                raise RuntimeError(f"{op} {name}, {tokens} tokens: relative error {error:.2g}")
        us = list(windows(program, arguments))
        median = statistics.median(us)
        entry[name] = {
            "us": round(median, 2),
            "spread": round((max(us) - min(us)) / median, 3),
        }
    return entry


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Time the operations around the experts.")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    result: dict[str, Any] = {
        **description(),
        "command": f"python -m scripts.bench_around_experts {' '.join(words)}".strip(),
        "results": [],
    }
    for op in BACKENDS:
        for tokens in arguments.tokens:
            result["results"].append(measure(op, tokens))
            print(json.dumps(result["results"][-1]), file=sys.stderr)
    if arguments.out:
        atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
