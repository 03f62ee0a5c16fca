"""Measures the CPU time of lowering an engine's programs for an H200, without a GPU.

    python -m scripts.bench_lowering --model moonlight-16b --pairs 3 \\
        --out benchmarks/results/lowering.json

It needs JAX's CUDA plugin. In each pair, one process lowers all programs with kernels that are
lowered once per process (:mod:`pallas_kernels.hopper.lowered_once`), and another one with kernels
that ``jax.jit`` lowers for every program anew. The one that begins changes from pair to pair. Times
are CPU seconds of the process, because other processes disturb them less.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode import machine, models
from dsv3_jax.engine.device.programs import Programs
from dsv3_jax.files import atomic_write
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.topology import topology
from pallas_kernels.hopper import lowered_once
from scripts import bench_engine
from scripts.bench_start_up import timed

PAGES = 10_000  # of the cache, which the H200 has room for; its size does not affect lowering
PAGE_SIZE = 64
WAYS = ("once per program", "once per process")


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the lowering of an engine's programs.")
    parser.add_argument("--model", default="moonlight-16b", help=models.HELP)
    parser.add_argument("--weights", default="bf16", choices=models.WEIGHTS)
    parser.add_argument("--programs", type=int, help="lower that many of different sizes, not all")
    parser.add_argument("--pairs", type=int, default=1, help="pairs of processes")
    parser.add_argument("--way", choices=WAYS, help="lower in this process, in one way")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def plain_caller(exports: Any, settings: dict[str, Any], arrays: dict[str, Any]) -> Any:
    """Returns the kernel itself in place of its module, see :meth:`lowered_once.Exports.caller`."""
    return exports.of_leaves(settings, jax.tree.structure(arrays))


def lower(arguments: argparse.Namespace) -> dict[str, Any]:
    """Lowers programs of an engine with default sizes, and returns the times of each.

    A process can do so in one way only, because JAX keeps what it has traced.
    """
    if arguments.way == WAYS[0]:
        exports: Any = lowered_once.Exports
        exports.caller = plain_caller
    devices = np.array(topology(Target.parse("h200x1")))
    mesh = jax.sharding.Mesh(devices, ("device",))
    on_device = jax.sharding.SingleDeviceSharding(devices[0])

    def placed(shapes: Sequence[Any]) -> list[Any]:
        return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device) for x in shapes]

    rows = []
    # Kernels are chosen for the device of the mesh in use.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        model = models.shapes(
            models.config(arguments.model), arguments.weights, jnp.bfloat16, mtp=False
        )
        defaults = bench_engine.parse(["--model", arguments.model])
        programs = Programs(
            model,
            bench_engine.buckets(defaults),
            num_slots=defaults.max_running,
            max_len=min(defaults.max_len, model.config.max_position_embeddings),
            page_size=PAGE_SIZE,
            drafter=None,
            depth=0,
            vocab_size=model.config.vocab_size,
        )
        programs.use(placed(programs.leaves))
        leaves, structure = programs.state_shapes(PAGES)
        for shape in spread(programs.shapes, arguments.programs):
            run = functools.partial(programs.lower, placed(leaves), structure, shape)
            lowered, seconds, cpu = timed(run)
            text = lowered.as_text()
            row = {"shape": shape.name, "seconds": round(seconds, 3), "cpu_s": round(cpu, 3)}
            rows.append(row | {"kernels": text.count("custom_call @mosaic_gpu")})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    total = round(sum(row["cpu_s"] for row in rows), 2)
    return {"way": arguments.way, "cpu_s": total, "programs": rows}


def spread(shapes: Sequence[Any], number: int | None) -> list[Any]:
    """Returns that many shapes of different sizes, or all, in the order of an engine's warm-up."""
    shapes = sorted(shapes, key=lambda s: s.decodes + s.chunks * s.chunk_tokens, reverse=True)
    return shapes if number is None else shapes[:: max(1, len(shapes) // number)][:number]


def in_a_process(words: Sequence[str], way: str) -> dict[str, Any]:
    """Runs this script in a new process that lowers in one way, and returns its result."""
    command = [sys.executable, "-m", "scripts.bench_lowering", *words, "--way", way]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"lowering {way}: exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main(words: Sequence[str]) -> int:
    arguments = parse(words)
    if arguments.way:
        print(json.dumps(lower(arguments)))
        return 0
    given = ["--model", arguments.model, "--weights", arguments.weights]
    if arguments.programs is not None:
        given += ["--programs", str(arguments.programs)]
    runs: list[dict[str, Any]] = []
    for number in range(arguments.pairs):
        pair = WAYS if number % 2 == 0 else WAYS[::-1]
        runs += [in_a_process(given, way) for way in pair]
    totals = {way: [run["cpu_s"] for run in runs if run["way"] == way] for way in WAYS}
    medians = {way: round(statistics.median(seconds), 2) for way, seconds in totals.items()}
    result = {**machine.description(), "model": arguments.model, "cpu_s": totals}
    result["median_cpu_s"] = medians
    if arguments.out:
        atomic_write(arguments.out, json.dumps(result | {"runs": runs}, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
