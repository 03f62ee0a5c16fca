"""Profiles an engine under load: how long the device pauses between kernels, and what it runs.

    python -m scripts.profile_engine --model moonlight-16b \\
        --out engine_pauses.json
    python -m scripts.profile_engine --model demo --count 24 --scale 0.1 --after 0.2 --seconds 0.5

A trace of requests is replayed as in ``scripts/bench_engine.py``, offline or at ``--rate``. After
``--after`` seconds the profiler records ``--seconds`` of it. ``idle_share`` is the share of that
time in which no kernel ran. ``pauses`` sorts the pauses by their length: the shortest lie between
two kernels of a step, and those of more than 20 us, if any, between two steps or where a step waits
for the host. ``around`` lists the kernels before and after the longer ones. While the profiler
starts and stops, the host launches little, so that only the ``--seconds`` after the first
``--settle`` ones count. Python is not traced, because that makes every launch slower. XLA launches
the kernels of CUDA graphs one by one under the profiler: an engine without it pauses less.
"""

from __future__ import annotations

import argparse
import bisect
import collections
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks import machine
from benchmarks.profile import trace
from benchmarks.serving.replay import replay
from dsv3_jax.engine import Engine
from dsv3_jax.files import atomic_write
from dsv3_jax.traces import TRACES
from scripts import bench_engine

PAUSES_US = (5, 20, 100, 1000)
"""Bounds between the lengths of pauses, in microseconds."""
LONG_US = 20  # a pause that does not lie between two kernels of a step
MAX_KERNELS = 40  # kernels recorded in the result
MAX_PAIRS = 12  # pairs of kernels around long pauses


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Profile an engine under load.")
    parser.add_argument("--model", default="demo", help=f"demo, {bench_engine.models.HELP}")
    parser.add_argument("--weights", default="bf16", choices=bench_engine.models.WEIGHTS)
    parser.add_argument("--trace", default="chat", choices=tuple(TRACES))
    parser.add_argument("--rate", type=float, help="requests per second; default all at once")
    parser.add_argument("--count", type=int, help="number of requests; default all")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    parser.add_argument("--max-running", type=int, default=512)
    parser.add_argument("--max-len", type=int, default=5120)
    parser.add_argument("--after", type=float, default=4.0, help="seconds before the profile")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of the profile")
    parser.add_argument("--settle", type=float, default=0.5, help="seconds of it that do not count")
    parser.add_argument("--store", type=Path, help="directory of the engine's stored programs")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def pauses(events: Iterable[trace.Event]) -> dict[str, Any]:
    """Returns the traced time, the share of it in which no kernel ran, and the pauses by length.

    Kernels that run at the same time count once.
    """
    ordered = sorted(events, key=lambda event: event.start_ns)
    if not ordered:
        raise RuntimeError("trace: expected kernels, got none; is the engine idle?")
    begin = end = ordered[0].start_ns
    last = ""
    groups = [{"count": 0, "us": 0.0} for _ in (*PAUSES_US, None)]
    pairs: collections.defaultdict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for event in ordered:
        if event.start_ns > end:
            us = (event.start_ns - end) / 1e3
            group = groups[bisect.bisect_left(PAUSES_US, us)]
            group["count"] += 1
            group["us"] += us
            if us > LONG_US:
                pairs[last, event.kernel].append(us)
        if event.start_ns + event.ns > end:
            end, last = event.start_ns + event.ns, event.kernel
    seconds = (end - begin) / 1e9
    names = [*(f"up to {us} us" for us in PAUSES_US), f"over {PAUSES_US[-1]} us"]
    return {
        "traced_s": round(seconds, 4),
        "idle_share": round(sum(group["us"] for group in groups) / 1e6 / seconds, 4),
        "pauses": {
            name: {"count": group["count"], "share": round(group["us"] / 1e6 / seconds, 4)}
            for name, group in zip(names, groups, strict=True)
        },
        "around": [
            {"before": before, "after": after, "count": len(us), "us": round(sum(us), 1)}
            for (before, after), us in sorted(pairs.items(), key=lambda item: -sum(item[1]))
        ][:MAX_PAIRS],
    }


def settled(events: Iterable[trace.Event], settle: float, seconds: float) -> list[trace.Event]:
    """Returns the events that begin from ``settle`` to ``settle + seconds`` after the first one."""
    events = list(events)
    begin = min((event.start_ns for event in events), default=0.0) + settle * 1e9
    return [event for event in events if begin <= event.start_ns <= begin + seconds * 1e9]


def record(seconds: float) -> list[trace.Event]:
    """Returns everything that runs on the device in the next seconds, and until the profiler has
    stopped."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            time.sleep(seconds)
        with warnings.catch_warnings():
            # jaxlib warns about its own types.
            warnings.simplefilter("ignore", DeprecationWarning)
            return list(trace.events(Path(directory)))


def main(words: Sequence[str]) -> int:
    arguments = parse(words)
    model = bench_engine.load(arguments.model, arguments.weights)
    max_len = min(arguments.max_len, model.config.max_position_embeddings)
    options = {"vocab_size": model.config.vocab_size, "scale": arguments.scale}
    chosen = TRACES[arguments.trace]()
    with (
        Engine(model, None, max_len, max_running=arguments.max_running) as engine,
        ThreadPoolExecutor(1) as thread,
    ):
        engine.warm_up(arguments.store)
        replay(engine, chosen, rate=None, count=8, **options)  # the first steps are slower
        engine.clear_prefix_cache()
        before = engine.stats()
        replayed = thread.submit(
            replay, engine, chosen, rate=arguments.rate, count=arguments.count, **options
        )
        time.sleep(arguments.after)
        recorded = record(arguments.settle + arguments.seconds)
        events = settled(recorded, arguments.settle, arguments.seconds)
        dispatches = engine.stats().since(before).dispatches
        replayed.result()
    result: dict[str, Any] = {
        **machine.description(),
        "command": f"python -m scripts.profile_engine {' '.join(words)}",
        "model": arguments.model,
        "trace": arguments.trace,
        "rate": arguments.rate,
        **pauses(events),
        "kernels": trace.by_name(events, 1)[:MAX_KERNELS],
        "dispatches": dispatches.as_json(),
    }
    if arguments.out:
        atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
