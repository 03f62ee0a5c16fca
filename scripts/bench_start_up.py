"""Measures what the engine's warm-up spends its time on, program by program.

    python -m scripts.bench_start_up --model moonlight-16b --cache DIR --programs 4
    python -m scripts.bench_start_up --model moonlight-16b --all --store DIR

The first command prepares some programs one after the other. ``lower_s`` is tracing and lowering in
Python; ``compile_s`` is XLA, or the loading of an executable from the compilation cache in DIR if
an earlier run has filled it. ``blocked_s`` is how long compilation or loading kept another Python
thread from running. With ``--all`` the engine's own warm-up is timed instead, and a short request
after it. The second run with the same ``--store`` loads the programs that the first has stored.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.decode import machine, models
from dsv3_jax.engine import Engine
from dsv3_jax.files import atomic_write
from scripts import bench_engine

_TICK = 0.001  # seconds


class GilWatch:
    """Counts the time in which a thread that wakes up every millisecond could not run."""

    def __init__(self):
        self.blocked = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> GilWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()

    def _work(self) -> None:
        last = time.perf_counter()
        while not self._done.wait(_TICK):
            now = time.perf_counter()
            self.blocked += max(0.0, now - last - 5 * _TICK)
            last = now


def timed(function: Callable[[], Any]) -> tuple[Any, float, float]:
    """Returns a function's result, its seconds, and those in which it used the CPU."""
    began, cpu = time.perf_counter(), time.process_time()
    result = function()
    return result, time.perf_counter() - began, time.process_time() - cpu


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the engine's warm-up.")
    parser.add_argument("--model", default="moonlight-16b", help=f"demo, {models.HELP}")
    parser.add_argument("--weights", default="bf16", choices=models.WEIGHTS)
    parser.add_argument("--cache", type=Path, help="directory of JAX's compilation cache")
    parser.add_argument("--programs", type=int, default=4, help="programs to prepare one by one")
    parser.add_argument("--store", type=Path, help="directory of the engine's stored programs")
    parser.add_argument("--all", action="store_true", help="time Engine.warm_up")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def one_by_one(engine: Engine, number: int) -> list[dict[str, Any]]:
    """Prepares programs in sequence, and returns the times of each."""
    programs, state = engine._executor.programs, engine._executor._launcher.state
    leaves, structure = jax.tree.flatten(state)
    rows = []
    shapes = sorted(programs.shapes, key=lambda s: s.decodes + s.chunks * s.chunk_tokens)
    for shape in shapes[:: max(1, len(shapes) // number)][:number]:
        lowered, lower_s, lower_cpu = timed(lambda s=shape: programs.lower(leaves, structure, s))
        with GilWatch() as watch:
            _, compile_s, compile_cpu = timed(lambda low=lowered, s=shape: programs.compile(low, s))
        row = {"shape": shape.name, "lower_s": lower_s, "lower_cpu_s": lower_cpu}
        row |= {"compile_s": compile_s, "compile_cpu_s": compile_cpu, "blocked_s": watch.blocked}
        rows.append({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main(words: Sequence[str]) -> int:
    arguments = parse(words)
    if arguments.cache:
        jax.config.update("jax_compilation_cache_dir", str(arguments.cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    model = bench_engine.load(arguments.model, arguments.weights)
    jax.block_until_ready(jax.tree.leaves(model))
    result: dict[str, Any] = {**machine.description(), "model": arguments.model}
    defaults = bench_engine.parse(["--model", arguments.model])
    with Engine(
        model,
        None,
        min(defaults.max_len, model.config.max_position_embeddings),
        max_running=defaults.max_running,
        buckets=bench_engine.buckets(defaults),
    ) as engine:
        if arguments.all:
            _, seconds, cpu = timed(lambda: engine.warm_up(arguments.store))
            result |= {"warm_up_s": round(seconds, 2), "warm_up_cpu_s": round(cpu, 2)}
            request = engine.submit([1] * 100, max_new_tokens=4)
            completion, first_s, _ = timed(request.result)
            result |= {"request_s": round(first_s, 3), "tokens": list(completion.tokens)}
        else:
            result["programs"] = one_by_one(engine, arguments.programs)
    if arguments.out:
        atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
