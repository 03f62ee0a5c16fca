"""Checks and times the back-ends of expert routing on a Hopper GPU, in about a minute.

    python -m scripts.bench_route [--tokens 64 512 2304] [--models moonlight v3]
        [--implementations one_kernel two_kernels counting]
        [--out benchmarks/results/route_h200.json]

``one_kernel`` and ``two_kernels`` are the Hopper kernel's plans. ``mosaic_gpu`` chooses one of them
by the numbers of tokens and experts.

Tokens are random, and one in ten is padding, as in a step of the serving engine. Choices and
positions must equal the reference's, and scores and weights must be close, or a back-end is not
timed. A time is the median over windows of programs of 8 sequential calls, by the GPU's clock
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
from benchmarks.kernels.jax_timing import (
    Timed,
    compile_program,
    counted,
    lowered_program,
    start_arguments,
)
from dsv3_jax.files import atomic_write
from pallas_kernels import route
from pallas_kernels.route import mosaic_gpu
from pallas_kernels.route.reference import Routes, Rule

TOKENS = [64, 128, 256, 384, 512, 1024, 2304]
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "moonlight": (64, {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1}),
    "v3": (256, {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}),
}
"""By model: the number of experts, and settings of route."""

COMMON = {"method": "noaux_tc", "scoring": "sigmoid", "normalize": True, "scaling_factor": 2.5}
PLANS = {"one_kernel": True, "two_kernels": False}
SETS, LAPS = 4, 2  # input sets of a program, and calls with each
WARM_S = 0.15  # of each program before it is timed
COMPILATIONS = 14  # at once
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


def fault(got: Routes, expected: Routes) -> str | None:
    """Returns what is wrong with a back-end's results, or None."""
    for name, g, w in zip(got._fields, jax.device_get(got), jax.device_get(expected), strict=True):
        if name in ("scores", "weights"):
            error = float(np.max(np.abs(g - w) / np.maximum(np.abs(w), 1e-6)))
            if not error <= CLOSE:
                return f"{name}: expected a relative error of at most {CLOSE}, got {error}"
        elif wrong := int(np.sum(g != w)):
            return f"{name}: expected the reference's, got {wrong} others of {w.size}"
    return None


def lowered(case: Case, sets: list[Any]) -> Any:
    """Lowers the program of a back-end, or the reference for one set."""
    f = function(case[0], case[2])
    if case[2] == "reference":
        return jax.jit(f).lower(*sets[0])

    def call(arrays: Any) -> Any:
        return f(*arrays), None

    return lowered_program(call, LAPS, sets)


def measure(
    lowering: Any, executable: Any, sets: list[Any], expected: Routes, is_kernel: bool
) -> dict[str, Any]:
    """Checks a program's results and times it. ``is_kernel``: whether it is the Hopper kernel."""
    results, _ = executable(sets, *start_arguments())
    if wrong := fault(results[0], expected):
        return {"error": wrong}
    count = counted(lowering, executable, SETS * LAPS, kernels=is_kernel)
    if "error" in count:
        return count
    out_bytes = sum(x.nbytes for x in jax.tree.leaves(results))
    windows = Timed(executable, sets, SETS * LAPS, out_bytes).windows(WARM_S)
    us = windows["us"]
    return {
        "us": round(statistics.median(us), 2),
        "spread": round((max(us) - min(us)) / statistics.median(us), 3),
        "busy": round(windows.get("busy", 1.0), 2),
        "kernels": count["kernels_a_call"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and time the back-ends of route.")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument(
        "--implementations",
        nargs="+",
        default=[*PLANS, "counting"],
        choices=["mosaic_gpu", *PLANS, "counting"],
    )
    parser.add_argument("--out", type=Path, help="JSON file; by default it is only printed")
    arguments = parser.parse_args()
    shapes = [(model, tokens) for model in arguments.models for tokens in arguments.tokens]
    sets = {shape: [arrays_of(*shape, seed) for seed in range(SETS)] for shape in shapes}
    names = ["reference", *arguments.implementations]
    cases = [(*shape, name) for shape in shapes for name in names]
    result: dict[str, Any] = description() | {"calls": SETS * LAPS, "rows": []}
    # All are compiled before the first is timed, because compilation would disturb times.
    lowerings = {case: lowered(case, sets[case[:2]]) for case in cases}
    with concurrent.futures.ThreadPoolExecutor(COMPILATIONS) as pool:
        programs = dict(zip(cases, pool.map(compile_program, lowerings.values()), strict=True))
    expected = {shape: programs[*shape, "reference"](*sets[shape][0]) for shape in shapes}
    for case in cases:
        if case[2] == "reference":
            continue
        shape = case[:2]
        row: dict[str, Any] = dict(zip(("model", "tokens", "implementation"), case, strict=True))
        program = lowerings[case], programs[case]
        row |= measure(*program, sets[shape], expected[shape], case[2] != "counting")
        result["rows"].append(row)
        print(*row.values(), flush=True)
        if arguments.out is not None:
            atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")
    if arguments.out is None:
        print(json.dumps(result))
    if faults := [row for row in result["rows"] if "error" in row]:
        raise SystemExit(f"{len(faults)} rows have errors, first {faults[0]}")


if __name__ == "__main__":
    main()
