"""Times the operations around a layer's routed experts on a GPU, with every back-end.

    python -m scripts.bench_around_experts --out benchmarks/results/around_experts_h200.json

``gather_rows`` copies each token for its six experts, and ``swiglu`` is the first half of the
shared experts; both have Moonlight's widths, in bfloat16. ``us`` is the time per call, by the
GPU's clock (:mod:`benchmarks.kernels.clock`) in programs of several sequential calls: the median of
the windows, and their spread. Results are compared with the reference before.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode.machine import description
from benchmarks.kernels.jax_timing import (
    Timed,
    compile_program,
    lowered_program,
    start_arguments,
)
from dsv3_jax.files import atomic_write
from pallas_kernels import gather_rows, swiglu

WIDTH, HIDDEN, EXPERTS = 2048, 2816, 6
TOKENS = 96, 128, 256, 384, 512, 1024, 2560
SETS, LAPS = 4, 2  # input sets of a program, and calls with each
BACKENDS = {
    "gather_rows": ("mosaic_gpu", "reference"),
    "swiglu": ("mosaic_gpu", "separate", "reference"),
}
TOLERANCE = 2.0**-6  # of the largest number: some roundings to bfloat16


def inputs(op: str, tokens: int) -> list[Any]:
    """Returns the arguments of the calls of a program: each has its own."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32), jnp.bfloat16)

    if op == "swiglu":
        matrices = [normal(HIDDEN, WIDTH) / WIDTH**0.5 for _ in range(2 * SETS)]
        return [(normal(tokens, WIDTH), *matrices[2 * i :][:2]) for i in range(SETS)]
    pairs = [random.permutation(tokens * EXPERTS) // EXPERTS for _ in range(SETS)]
    return [(normal(tokens, WIDTH), jnp.asarray(rows, jnp.int32)) for rows in pairs]


def measure(op: str, tokens: int) -> dict[str, Any]:
    """Returns the times of each back-end that takes the arguments."""
    function: Callable[..., Any] = {"gather_rows": gather_rows, "swiglu": swiglu}[op]
    sets = inputs(op, tokens)
    reference = jax.jit(functools.partial(function, implementation="reference"))
    wanted = np.asarray(reference(*sets[0]), np.float32)
    entry: dict[str, Any] = {"op": op, "tokens": tokens}
    for name in BACKENDS[op]:

        def call(arrays: Any, name: str = name) -> tuple[jax.Array, None]:
            return function(*arrays, implementation=name), None

        try:
            program = compile_program(lowered_program(call, LAPS, sets))
        except NotImplementedError:
            continue  # the dispatch skips it, too
        results, _ = program(sets, *start_arguments())
        error = np.abs(np.asarray(results[0], np.float32) - wanted).max() / np.abs(wanted).max()
        if not error <= TOLERANCE:
            raise RuntimeError(f"{op} {name}, {tokens} tokens: relative error {error:.2g}")
        us = Timed(program, sets, SETS * LAPS, sum(x.nbytes for x in results)).windows()["us"]
        median = statistics.median(us)
        spread = (max(us) - min(us)) / median
        entry[name] = {"us": round(median, 2), "spread": round(spread, 3)}
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
