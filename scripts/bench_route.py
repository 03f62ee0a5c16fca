"""Checks and times the back-ends of expert routing on a Hopper GPU, in about a minute.

    python -m scripts.bench_route [--tokens 64 512 2304] [--models moonlight v3]
        [--implementations one_kernel two_kernels counting]
        [--out benchmarks/results/route_h200.json]

``one_kernel`` and ``two_kernels`` are the Hopper kernel's plans, of which ``mosaic_gpu`` chooses
one by the number of tokens.

Tokens are random, and one in ten is padding, as in a step of the serving engine. Choices and
positions must equal the reference's, and scores and weights must be close, or a back-end is not
timed. A time is the median over windows of programs of 16 sequential calls, by the GPU's clock
(:mod:`benchmarks.kernels.clock`). ``kernels`` counts what a call launches.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode.machine import description
from benchmarks.kernels.jax_timing import Timed, compile_program, counted, lowered_program
from dsv3_jax.files import atomic_write
from pallas_kernels import route
from pallas_kernels.route import mosaic_gpu
from pallas_kernels.route.reference import Rule

TOKENS = [8, 64, 128, 256, 384, 512, 768, 1024, 2304, 8192]
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "moonlight": (64, {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1}),
    "v3": (256, {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}),
}
"""By model: the number of experts, and settings of route."""

COMMON = {"method": "noaux_tc", "scoring": "sigmoid", "normalize": True, "scaling_factor": 2.5}
PLANS = {"one_kernel": True, "two_kernels": False}
SETS, LAPS = 4, 4  # input sets of a program, and calls with each
CLOSE = 1e-5  # relative error of scores and weights

Case = tuple[str, int, str]
"""Model, tokens, implementation."""


def arrays_of(model: str, tokens: int, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns logits, bias and the mask of valid tokens."""
    rng, experts = np.random.default_rng(seed), MODELS[model][0]
    logits = rng.standard_normal((tokens, experts)).astype(np.float32)
    bias = 0.1 * rng.standard_normal(experts).astype(np.float32)
    return jnp.asarray(logits), jnp.asarray(bias), jnp.asarray(rng.random(tokens) < 0.9)


def function(model: str, implementation: str) -> Any:
    settings = MODELS[model][1] | COMMON
    if implementation in PLANS:
        rule, one_kernel = Rule(**settings), PLANS[implementation]
        return functools.partial(mosaic_gpu.route, rule=rule, one_kernel=one_kernel)
    return functools.partial(route, **settings, implementation=implementation)


def fault(model: str, tokens: int, implementation: str) -> str | None:
    """Returns what is wrong with a back-end's results, or None."""
    arrays = arrays_of(model, tokens, seed=0)
    got = jax.jit(function(model, implementation))(*arrays)
    want = jax.jit(function(model, "reference"))(*arrays)
    for name, g, w in zip(got._fields, jax.device_get(got), jax.device_get(want), strict=True):
        if name in ("scores", "weights"):
            error = float(np.max(np.abs(g - w) / np.maximum(np.abs(w), 1e-6)))
            if not error <= CLOSE:
                return f"{name}: expected a relative error of at most {CLOSE}, got {error}"
        elif wrong := int(np.sum(g != w)):
            return f"{name}: expected the reference's, got {wrong} others of {w.size}"
    return None


def prepare(case: Case) -> tuple[Timed | None, dict[str, Any]]:
    """Checks a back-end and compiles the program to time. Returns it, and the row of results."""
    model, tokens, implementation = case
    row: dict[str, Any] = dict(zip(("model", "tokens", "implementation"), case, strict=True))
    if wrong := fault(*case):
        return None, row | {"error": wrong}
    f = function(model, implementation)
    sets: list[Any] = [arrays_of(model, tokens, seed) for seed in range(SETS)]
    lowered = lowered_program(lambda arrays: (f(*arrays), None), LAPS, sets)
    executable = compile_program(lowered)
    calls = SETS * LAPS
    count = counted(lowered, executable, calls, kernels=implementation != "counting")
    if "error" in count:
        return None, row | count
    out_bytes = sum(4 * x.size for x in jax.tree.leaves(jax.eval_shape(f, *sets[0]))) * calls
    return Timed(executable, sets, calls, out_bytes), row | {"kernels": count["kernels_a_call"]}


def timed(program: Timed) -> dict[str, Any]:
    windows = program.windows()
    us = windows["us"]
    spread = (max(us) - min(us)) / statistics.median(us)
    return {
        "us": round(statistics.median(us), 2),
        "spread": round(spread, 3),
        "busy": round(windows.get("busy", 1.0), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and time the back-ends of route.")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--implementations", nargs="+", default=[*PLANS, "counting"])
    parser.add_argument("--out", type=Path, help="JSON file; by default it is only printed")
    arguments = parser.parse_args()
    cases = [
        (model, tokens, implementation)
        for model in arguments.models
        for tokens in arguments.tokens
        for implementation in arguments.implementations
    ]
    result: dict[str, Any] = description() | {"rows": []}
    # All are compiled before the first is timed, because compilation would disturb times.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        prepared = list(pool.map(prepare, cases))
    for program, row in prepared:
        if program is not None:
            row |= timed(program)
        result["rows"].append(row)
        print(*row.values(), flush=True)
        if arguments.out is not None:
            atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")
    if arguments.out is None:
        print(json.dumps(result))
    if faults := [row for row in result["rows"] if "error" in row]:
        raise SystemExit(f"{len(faults)} rows have errors, of which the first is {faults[0]}")


if __name__ == "__main__":
    main()
