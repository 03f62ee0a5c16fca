"""Checks and times float8 rows by int4 matrices (w4a8) on a Hopper GPU.

    python -m scripts.bench_w4a8 [--shapes 8x4096x4096x7168 ...] [--out FILE]

A shape is groups x rows per group x N x K. ``float8`` is the float8 kernel with matrices of twice
the bytes, the time to beat. ``w4a8`` multiplies float8 rows and ``bfloat16`` bfloat16 rows, as a
model does without float8 activations. These two are compared with the reference first. They are not
timed if they are wrong or if two calls differ. A time is the median over windows of programs of
sequential calls, by the GPU's clock (:mod:`benchmarks.kernels.clock`).
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.decode.machine import description
from benchmarks.integers import random_int4
from benchmarks.kernels.jax_timing import Timed, compile_program, lowered_program, start_arguments
from dsv3_jax.files import atomic_write
from pallas_kernels import grouped_matmul

SHAPES = ["8x4096x4096x7168", "8x4096x7168x2048", "32x256x4096x7168", "32x256x7168x2048"]
LAPS = 2  # calls with each of two input sets
WARM_S = 0.3
MOST_ERROR = 2.0**-7  # relative, of a row: bfloat16's rounding, and float8 sums in the tensor cores
BLOCK = (1, 128)


def inputs(G: int, rows: int, N: int, K: int, seed: int) -> dict[str, Any]:
    """Returns random operands of every implementation."""
    keys = jax.random.split(jax.random.key(seed), 5)
    float8 = jnp.float8_e4m3fn
    rhs, blocks = random_int4(keys[1], (G, N, K // 2)), K // 128
    return {
        "lhs": jax.random.normal(keys[0], (G * rows, K), jnp.bfloat16).astype(float8),
        "bfloat16": jax.random.normal(keys[0], (G * rows, K), jnp.bfloat16),
        "lhs_scale": jax.random.uniform(keys[2], (G * rows, blocks), minval=0.5, maxval=1.5),
        "rhs": rhs,
        "rhs_scale": jax.random.uniform(keys[3], (G, N, blocks), minval=0.5, maxval=1.5),
        "float8": jax.random.normal(keys[4], (G, N, K), jnp.bfloat16).astype(float8),
        "float8_scale": jnp.ones((G, -(-N // 128), blocks)),
        "sizes": jnp.full((G,), rows, jnp.int32),
    }


def of_float8(x: dict[str, Any]) -> jax.Array:
    return grouped_matmul(
        x["lhs"], x["float8"], x["sizes"], x["lhs_scale"], x["float8_scale"],
        implementation="mosaic_gpu",
    )  # fmt: skip


def of_int4(x: dict[str, Any], implementation: str = "mosaic_gpu") -> jax.Array:
    arrays = x["lhs"], x["rhs"], x["sizes"], x["lhs_scale"], x["rhs_scale"]
    return grouped_matmul(*arrays, block_shape=BLOCK, implementation=implementation)


def of_bfloat16(x: dict[str, Any], implementation: str = "mosaic_gpu") -> jax.Array:
    arrays = x["bfloat16"], x["rhs"], x["sizes"], None, x["rhs_scale"]
    return grouped_matmul(*arrays, block_shape=BLOCK, implementation=implementation)


IMPLEMENTATIONS = {"w4a8": of_int4, "float8": of_float8, "bfloat16": of_bfloat16}


def measure(G: int, rows: int, N: int, K: int) -> list[dict[str, Any]]:
    """Returns a row for each implementation."""
    sets = [inputs(G, rows, N, K, seed) for seed in range(2)]
    results = []
    for name, function in IMPLEMENTATIONS.items():
        row: dict[str, Any] = {"shape": f"g{G} m{rows} {N}x{K}", "implementation": name}
        results.append(row)

        def call(x: Any, function: Any = function) -> Any:
            return function(x), None

        executable = compile_program(lowered_program(call, LAPS, sets))
        outs, _ = executable(sets, *start_arguments())
        if function is not of_float8:
            want = jax.jit(functools.partial(function, implementation="reference"))(sets[0])
            row["error"] = float(jax.jit(_error)(outs[0], want))
            if not row["error"] <= MOST_ERROR or bool((outs[0] != outs[2]).any()):
                row["wrong"] = f"expected at most {MOST_ERROR}, and equal calls"
                continue
        out_bytes = sum(out.nbytes for out in outs)
        us = Timed(executable, sets, len(sets) * LAPS, out_bytes).windows(WARM_S)["us"]
        row["us"] = round(statistics.median(us), 1)
        row["tflops"] = round(2e-6 * G * rows * N * K / row["us"], 1)
        row["spread"] = round((max(us) - min(us)) / row["us"], 3)
    return results


def _error(got: jax.Array, want: jax.Array) -> jax.Array:
    """Returns the largest error of a row, relative to the row's norm."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.max(jnp.linalg.norm(got - want, axis=1) / jnp.linalg.norm(want, axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and time w4a8 matmuls.")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--out", type=Path, help="JSON file; by default it is only printed")
    arguments = parser.parse_args()
    result: dict[str, Any] = description() | {"rows": []}
    for shape in arguments.shapes:
        for row in measure(*map(int, shape.split("x"))):
            print(json.dumps(row), flush=True)
            result["rows"].append(row)
        if arguments.out:
            atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
