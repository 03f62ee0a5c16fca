"""Profiles a whole decode step by kernel, on the default device.

    python -m scripts.profile_step --model moonlight-16b --weights bf16 --batches 1 64 256 \\
        [--cached 1024] [--feed-forward mosaic_gpu] [--out benchmarks/results/step_h200.json]

Profiles the generator's decode program with random weights, as in ``scripts/bench_decode.py``.
Kernels are traced without CUDA graphs, because only then does the profiler report which operation a
kernel belongs to, and summed by the module that it comes from. ``wall`` is the time of a
step as it runs by default, and ``captured`` lists the kernels of that run by name. ``busy`` is the
share of that run in which some kernel ran; profiling lengthens the pauses between small kernels,
and can more than double the step's time. ``host_waits_us`` is the part of a step in which the GPU
waits for the host.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.decode import models, steps
from benchmarks.profile import trace
from benchmarks.profile.operations import operations
from dsv3_jax.cli import allocator
from dsv3_jax.files import atomic_write
from dsv3_jax.model import DeepSeekV3

TRACED = 4  # traced steps
MAX_KERNELS = 40  # kernels recorded in the result


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Profile a decode step by kernel.")
    parser.add_argument("--model", default="moonlight-16b", help=models.HELP)
    parser.add_argument("--weights", nargs="+", default=["bf16"], choices=models.WEIGHTS)
    parser.add_argument(
        "--activations", choices=("float8",), help="dtype of activations in large matmuls"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--cached", type=int, default=1024, help="cached tokens per sequence")
    parser.add_argument(
        "--feed-forward",
        choices=models.FEED_FORWARD,
        help="back-end of the second half of layers",
    )
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def profile(model: DeepSeekV3, rows: int, cached: int) -> dict[str, Any]:
    decode = steps.Decode(model, rows, cached)
    wall = decode.measure(cached)["ms"]
    captured = serial = decode.compiled
    if jax.default_backend() == "gpu":
        captured, serial = decode.compile(trace.CAPTURED), decode.compile(trace.SERIAL)
    fast = trace.traced(lambda: decode.dispatch(steps.LONG, cached, captured), 1)
    slow = trace.kernels(trace.traced(lambda: decode.dispatch(TRACED, cached, serial), 1))
    summary = trace.summed(slow, operations(serial.executable.as_text() or ""), TRACED)
    summary["kernels"] = summary["kernels"][:MAX_KERNELS]
    return {
        "step": f"decode {rows} x 1, {cached} cached",
        "wall_us": round(1e3 * wall, 1),
        "busy": round(trace.busy_fraction(fast), 4),
        "host_waits_us": round(trace.host_waits_us(fast, steps.LONG), 2),
        "captured": trace.by_name(fast, steps.LONG)[:MAX_KERNELS],
    } | summary


def main() -> None:
    allocator.configure("generate")  # as a command that runs a model
    arguments = parse(sys.argv[1:])
    config = models.config(arguments.model)
    result = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "model": arguments.model,
        "activations": arguments.activations,
        "feed_forward": arguments.feed_forward,
        "profiles": [],
    }
    for weights in arguments.weights:
        model = models.random_model(models.shapes(config, weights, arguments.dtype, mtp=False))
        if arguments.activations:
            model.use_float8_activations()
        model.use_feed_forward(arguments.feed_forward)
        for rows in arguments.batches:
            row = {"weights": weights} | profile(model, rows, arguments.cached)
            busy = f"busy {row['busy']:.1%} of the time, {row['host_waits_us']:.1f} us per step"
            print(f"{trace.table(row)}\n  {busy} waiting for the host", flush=True)
            result["profiles"].append(row)
            if arguments.out:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
