"""Measures what HTTP costs: a trace replayed on an engine, and through a server on the same engine.

    python -m scripts.bench_http --model moonlight-16b --rates 8 24 --rounds 3 \\
        --out benchmarks/results/http_moonlight_h200.json
    python -m scripts.bench_http --model demo --scale 0.05 --count 16

The trace is replayed offline, all requests at once, and then at every rate. Each replay runs
``--rounds`` times in both ways, alternately, with an empty prefix cache at the beginning. HTTP and
the clients have a process each. The engine decodes the text of all completions in both ways.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import json
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dsv3_jax
from benchmarks import machine
from benchmarks.decode import models
from benchmarks.serving.local_server import random_tokenizer, serving
from benchmarks.serving.replay import replay
from dsv3_jax.client.completions import CompletionClient
from dsv3_jax.client.workload import Workload, open_loop, results
from dsv3_jax.engine import Engine
from dsv3_jax.files import atomic_write
from dsv3_jax.traces import TRACES
from scripts import bench_engine


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what HTTP costs an engine.")
    parser.add_argument("--model", default="demo", help=f"demo, {models.HELP}")
    parser.add_argument("--weights", default="bf16", choices=models.WEIGHTS)
    parser.add_argument("--trace", default="chat", choices=tuple(TRACES))
    parser.add_argument("--rates", nargs="*", type=float, default=[], help="requests per second")
    parser.add_argument("--count", type=int, help="requests of a replay; default all")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-running", type=int, default=512)
    parser.add_argument("--max-len", type=int, default=5120)
    parser.add_argument("--store", type=Path, help="directory of the engine's stored programs")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def read_streams(url: str, model: str, workload: Workload, rate: float) -> dict[str, Any]:
    """Sends all requests, reads their streams, and returns the client's figures."""

    async def read() -> dict[str, Any]:
        async with CompletionClient(url) as client:
            return results(
                await open_loop(
                    lambda i: client.complete(
                        model, workload.prompts[i], workload.output_tokens[i]
                    ),
                    workload.arrivals(rate),
                )
            )

    return asyncio.run(read())


def over_http(figures: dict[str, Any], requests: int) -> dict[str, float]:
    """Returns the figures of a client that are compared."""
    if figures["completed"] != requests:
        raise RuntimeError(f"expected {requests} answers, got {figures['completed']}")
    return {
        "output_tokens_per_second": figures["output_throughput"],
        "ttft_p50_ms": figures["median_ttft_ms"],
        "tpot_p50_ms": figures["median_tpot_ms"],
    }


def on_the_engine(summary: dict[str, Any]) -> dict[str, float]:
    """Returns the same figures of a replay without HTTP."""
    return {
        "output_tokens_per_second": summary["output_tokens_per_second"],
        "ttft_p50_ms": summary["ttft_ms"]["p50"],
        "tpot_p50_ms": summary["tpot_ms"].get("p50", 0.0),
    }


def compare(ways: dict[str, Callable[[], dict[str, float]]], rounds: int) -> dict[str, Any]:
    """Runs both ways alternately. Returns their figures, and the medians of ratio and difference in
    a round."""
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            figures[name].append(run())
            print(json.dumps({name: figures[name][-1]}), file=sys.stderr)
    pairs = list(zip(figures["http"], figures["engine"], strict=True))

    def median(name: str, of: Callable[[float, float], float]) -> float:
        return round(statistics.median(of(http[name], engine[name]) for http, engine in pairs), 4)

    return {
        **figures,
        "throughput_ratio": median("output_tokens_per_second", lambda a, b: a / b),
        "added_ttft_p50_ms": median("ttft_p50_ms", lambda a, b: a - b),
        "added_tpot_p50_ms": median("tpot_p50_ms", lambda a, b: a - b),
    }


def main(words: Sequence[str]) -> int:
    arguments = parse(words)
    model = bench_engine.load(arguments.model, arguments.weights)
    vocab_size = model.config.vocab_size
    tokenizer = dsv3_jax.load("demo")[1] if arguments.model == "demo" else None
    if tokenizer is None:
        tokenizer = random_tokenizer(vocab_size)
    trace = TRACES[arguments.trace]()
    workload = Workload.of(
        trace,
        arguments.count,
        scale=arguments.scale,
        max_len=arguments.max_len,
        vocab_size=vocab_size,
    )
    if workload.shortened:
        print(f"--max-len: {workload.shortened} requests are longer than it", file=sys.stderr)
        return 2
    requests = len(workload.prompts)
    result: dict[str, Any] = {
        **machine.description(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "model": arguments.model,
        "trace": arguments.trace,
        "requests": requests,
        "rounds": arguments.rounds,
        "replays": [],
    }
    spawn = multiprocessing.get_context("spawn")
    with (
        Engine(model, tokenizer, arguments.max_len, max_running=arguments.max_running) as engine,
        concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as clients,
    ):
        result["warm_up_s"] = round(engine.warm_up(arguments.store), 2)
        with serving(
            engine, tokenizer, "model", max_requests=2 * requests, max_len=arguments.max_len
        ) as url:
            few = Workload.of(
                trace, 1, scale=0.01, max_len=arguments.max_len, vocab_size=vocab_size
            )
            clients.submit(read_streams, url, "model", few, math.inf).result()  # imports
            # The first steps of a program are slower.
            replay(engine, trace, rate=None, count=8, vocab_size=vocab_size, scale=0.1)
            for rate in (None, *arguments.rates):

                def replayed(rate: float | None = rate) -> dict[str, float]:
                    engine.clear_prefix_cache()
                    options = {"vocab_size": vocab_size, "scale": arguments.scale}
                    done = replay(engine, trace, rate=rate, count=arguments.count, **options)
                    return on_the_engine(done.summary())

                def served(rate: float | None = rate) -> dict[str, float]:
                    engine.clear_prefix_cache()
                    arrivals = math.inf if rate is None else rate
                    job = clients.submit(read_streams, url, "model", workload, arrivals)
                    return over_http(job.result(), requests)

                compared = compare({"engine": replayed, "http": served}, arguments.rounds)
                result["replays"].append({"rate": rate, **compared})
                if arguments.out:
                    atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
