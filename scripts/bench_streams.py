"""Measures whether HTTP keeps the engine's thread from its steps.

    python -m scripts.bench_streams --streams 64 --out benchmarks/results/streams_cpu.json

The same requests are served without HTTP, where nobody reads their text, and then as open streams,
alternately. HTTP and the clients have a process each; with ``--one-process`` HTTP is served from
the engine's. The device sleeps for ``--step-ms`` in every step and uses no core. Any further time
is the host's.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import gc
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.decode import machine
from benchmarks.serving.local_server import serving, serving_in_a_process
from benchmarks.serving.sleeping_device import sleeping_engine
from dsv3_jax.client.completions import CompletionClient
from dsv3_jax.client.load import closed_loop
from dsv3_jax.client.results import results
from dsv3_jax.engine import Engine, EngineStats
from dsv3_jax.files import atomic_write

_PROMPT_TOKENS = 16


def prompts(count: int) -> list[list[int]]:
    """Returns prompts without a common beginning."""
    return [[10 + i, *[20] * (_PROMPT_TOKENS - 1)] for i in range(count)]


def without_http(engine: Engine, count: int, new_tokens: int) -> None:
    """Serves requests whose text nobody reads before the end."""
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "ignore_eos": True}
    for request in engine.submit_all(prompts(count), temperature=0.0, **settings):
        request.result()


def read_streams(url: str, count: int, new_tokens: int) -> dict[str, Any]:
    """Opens streams, reads all of them, and returns the client's figures."""

    async def read() -> dict[str, Any]:
        texts = prompts(count)
        async with CompletionClient(url) as client:
            return results(
                await closed_loop(
                    lambda i: client.complete("demo", texts[i], new_tokens), count, count
                )
            )

    return asyncio.run(read())


def summary(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """Returns figures of the steps between two moments: mean times in milliseconds."""
    stats = after.since(before)
    times = stats.dispatches
    seconds = times.seconds_in_flight + times.seconds_between
    return {
        "steps": stats.steps,
        "step_ms": round(1e3 * seconds / stats.steps, 3),
        "host_ms": round(stats.host_us_per_step / 1e3, 3),
        "output_tokens": stats.output_tokens,
    }


def measure(
    streams: int, new_tokens: int, rounds: int, step_seconds: float, *, one_process: bool
) -> dict[str, Any]:
    """Returns the figures of both arms, round by round, and their medians."""
    max_len = _PROMPT_TOKENS + new_tokens
    engine, tokenizer = sleeping_engine(streams, max_len, step_seconds)
    arms: dict[str, list[dict[str, Any]]] = {"without_http": [], "streams": []}
    spawn = multiprocessing.get_context("spawn")
    serve = serving if one_process else serving_in_a_process
    with (
        concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as clients,
        serve(engine, tokenizer, "demo", max_requests=streams, max_len=max_len) as url,
    ):
        clients.submit(read_streams, url, streams, 2).result()  # imports and opens connections
        for _ in range(rounds):
            for name in arms:
                engine.clear_prefix_cache()
                gc.collect()
                before = engine.stats()
                client = {}
                if name == "streams":
                    client = clients.submit(read_streams, url, streams, new_tokens).result()
                    assert client["completed"] == streams, client
                else:
                    without_http(engine, streams, new_tokens)
                _wait_until_idle(engine)  # the last step's results are counted
                arms[name].append(summary(before, engine.stats()))
                keys = (
                    "median_ttft_ms",
                    "median_itl_ms",
                    "p99_itl_ms",
                    "median_e2el_ms",
                    "output_throughput",
                )
                arms[name][-1] |= {key: round(client[key], 2) for key in keys if client}
    medians = {
        f"{figure}_{name}": statistics.median(each[figure] for each in figures)
        for name, figures in arms.items()
        for figure in ("step_ms", "host_ms")
    }
    return {**medians, "rounds": arms}


def _wait_until_idle(engine: Engine) -> None:
    """Waits until no request holds cache pages, which it does to the end of its last step."""
    end = time.monotonic() + 60
    while engine.stats().running or engine.stats().cache_usage:
        assert time.monotonic() < end, engine.stats()
        time.sleep(0.005)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure an engine's steps under open streams.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of the sleeping device")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one-process", action="store_true", help="HTTP in the engine's process")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    result = {
        **machine.description(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "streams": arguments.streams,
        "new_tokens": arguments.new_tokens,
        "device_ms": arguments.step_ms,
        "one_process": arguments.one_process,
        **measure(
            arguments.streams,
            arguments.new_tokens,
            arguments.rounds,
            arguments.step_ms / 1e3,
            one_process=arguments.one_process,
        ),
    }
    if arguments.out:
        atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
