"""Measures the serving engine on request traces.

    python -m scripts.bench_engine --model moonlight-16b --traces chat prefixed --rates 8 24 \\
        --count 384 --out benchmarks/results/engine_h200.json
    python -m scripts.bench_engine --model moonlight-16b --count 48 --profile /tmp/trace

Each trace is replayed offline, all requests at once, and then at every rate in requests per second.
A model has published widths and random weights; ``demo`` is the trained checkpoint of this package.
All programs are compiled first, and an engine serves all replays, with an empty prefix cache at the
beginning of each. The results are written after every replay: throughput and latencies, and how
many steps of each shape ran for how long, with the share of the time in which no dispatch was in
flight. ``--profile`` also records a trace, which has the device time of each kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import dsv3_jax
from benchmarks import machine
from benchmarks.decode import models
from benchmarks.serving.replay import replay
from dsv3_jax.engine import Engine
from dsv3_jax.engine.device.programs import Buckets
from dsv3_jax.files import atomic_write
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.traces import TRACES


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the serving engine on request traces.")
    parser.add_argument("--model", default="demo", help=f"demo, {models.HELP}")
    parser.add_argument("--weights", default="bf16", choices=models.WEIGHTS)
    parser.add_argument("--traces", nargs="+", default=["chat"], choices=tuple(TRACES))
    parser.add_argument("--rates", nargs="*", type=float, default=[], help="requests per second")
    parser.add_argument("--count", type=int, help="requests of a replay at a rate; default all")
    parser.add_argument("--offline-count", type=int, help="requests offline; default all")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    parser.add_argument("--max-running", type=int, default=512, help="slots")
    parser.add_argument("--max-len", type=int, default=5120)
    parser.add_argument("--cache-tokens", type=int)
    parser.add_argument("--decodes", nargs="+", type=int, help="buckets of decoding requests")
    parser.add_argument("--chunks", nargs="+", type=int, help="buckets of prefill chunks")
    parser.add_argument("--chunk-tokens", type=int, help="tokens of a chunk")
    parser.add_argument("--max-steps", type=int, help="most decode steps in a dispatch")
    parser.add_argument("--draft", choices=("mtp", "ngram"))
    parser.add_argument("--draft-depth", type=_depth, default=1, help="a number, or auto")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--profile", type=Path, help="directory for a trace of all replays")
    parser.add_argument("--store", type=Path, help="directory of the engine's stored programs")
    parser.add_argument("--deterministic", action="store_true", help="one program for all steps")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def _depth(text: str) -> int | str:
    return text if text == "auto" else int(text)


def load(name: str, weights: str) -> DeepSeekV3:
    """Returns the demo, or a model with published widths and random weights."""
    if name == "demo":
        return dsv3_jax.load("demo")[0]
    config = models.config(name)
    return models.random_model(models.shapes(config, weights, jnp.bfloat16, mtp=False))


def buckets(arguments: argparse.Namespace) -> Buckets:
    """Returns the default buckets with what the arguments change."""
    changes = {
        "decodes": arguments.decodes and (*arguments.decodes, arguments.max_running),
        "chunks": arguments.chunks and tuple(arguments.chunks),
        "chunk_tokens": arguments.chunk_tokens,
        "max_steps": arguments.max_steps,
    }
    default = Buckets.of_devices(arguments.max_running, None)
    return dataclasses.replace(default, **{n: v for n, v in changes.items() if v is not None})


def histogram(dispatches: dict[str, Any]) -> str:
    """Returns a table of the shapes of steps, the one that took longest first."""
    total = dispatches["seconds_in_flight"]
    lines = [f"no dispatch in flight: {dispatches['idle_share']:.1%} of the time under load"]
    lines += [f"{'steps':>7} {'seconds':>9} {'share':>6} {'ms':>8}  shape"]
    for name, times in dispatches["shapes"].items():
        count, seconds = times["count"], times["seconds"]
        share, ms = seconds / total, 1e3 * seconds / count
        lines.append(f"{count:7} {seconds:9.3f} {share:6.1%} {ms:8.2f}  {name}")
    return "\n".join(lines)


def replay_all(
    engine: Engine, arguments: argparse.Namespace, vocab_size: int, result: dict[str, Any]
) -> None:
    """Replays every trace offline and at every rate, and adds the figures to ``result``."""
    result["replays"] = []
    for name in arguments.traces:
        for rate in (None, *arguments.rates):
            engine.clear_prefix_cache()
            done = replay(
                engine,
                TRACES[name](),
                rate=rate,
                count=arguments.offline_count if rate is None else arguments.count,
                vocab_size=vocab_size,
                scale=arguments.scale,
            )
            entry = {"trace": name, "rate": rate, **done.summary()}
            print(json.dumps(entry), file=sys.stderr)
            print(histogram(entry["engine"]["dispatches"]), file=sys.stderr)
            result["replays"].append(entry)
            save(result, arguments.out)


def save(result: dict[str, Any], out: Path | None) -> None:
    """Writes the results so far."""
    if out:
        atomic_write(out, json.dumps(result, indent=1) + "\n")


def main(words: Sequence[str]) -> int:
    arguments = parse(words)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("dsv3_jax.engine.device.programs").setLevel(logging.INFO)
    began = time.perf_counter()
    model = load(arguments.model, arguments.weights)
    jax.block_until_ready(jax.tree.leaves(model))
    loaded = time.perf_counter()
    result: dict[str, Any] = {
        **machine.description(),
        "model": arguments.model,
        "weights": arguments.weights,
        "buckets": dataclasses.asdict(buckets(arguments)),
        "plans_late": not arguments.no_overlap,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "load_s": round(loaded - began, 2),
    }
    with contextlib.ExitStack() as running:
        engine = running.enter_context(
            Engine(
                model,
                None,
                arguments.max_len,
                max_running=arguments.max_running,
                cache_tokens=arguments.cache_tokens,
                draft=arguments.draft,
                draft_depth=arguments.draft_depth,
                overlap=not arguments.no_overlap,
                deterministic=arguments.deterministic,
                buckets=buckets(arguments),
            )
        )
        result["warm_up_s"] = round(engine.warm_up(arguments.store), 2)
        print(
            f"loaded in {result['load_s']} s, compiled in {result['warm_up_s']} s", file=sys.stderr
        )
        # As `dsv3 serve` does: a full collection over a model's programs pauses all requests.
        gc.collect()
        gc.freeze()
        running.callback(gc.unfreeze)
        if arguments.profile:
            running.enter_context(jax.profiler.trace(str(arguments.profile)))
        replay_all(engine, arguments, model.config.vocab_size, result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
