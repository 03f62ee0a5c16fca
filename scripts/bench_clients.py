"""Compares the client of ``dsv3 bench serve`` with aiperf, on one server.

    pip install aiperf    # in an environment of its own: it pins many packages
    python -m scripts.bench_clients --aiperf PATH --out benchmarks/results/clients_cpu.json

Both commands send as many requests of the same lengths, ``--concurrency`` at a time, in alternating
rounds. The device sleeps for ``--step-ms`` in every step, so that the server answers both equally
fast and their figures should agree.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.decode import machine
from benchmarks.serving.local_server import serving_in_a_process
from benchmarks.serving.sleeping_device import sleeping_engine
from dsv3_jax.checkpoint.find import DEMO
from dsv3_jax.engine import Engine
from dsv3_jax.files import atomic_write

PROMPT_TOKENS = 32
FIGURES = {
    "median_ttft_ms": ("time_to_first_token", "p50"),
    "p99_ttft_ms": ("time_to_first_token", "p99"),
    "median_tpot_ms": ("inter_token_latency", "p50"),
    "median_e2el_ms": ("request_latency", "p50"),
    "p99_e2el_ms": ("request_latency", "p99"),
    "request_throughput": ("request_throughput", "avg"),
}
"""Our figures, and aiperf's of the same meaning. Its inter-token latency is our TPOT."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare two clients on one server.")
    parser.add_argument("--aiperf", default="aiperf", help="command (default: %(default)s)")
    parser.add_argument("--count", type=int, default=160, help="requests of a round")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=50)
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of the sleeping device")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def ours(url: str, count: int, concurrency: int, new_tokens: int, seed: int) -> dict[str, float]:
    """Sends requests with ``dsv3 bench serve``, and returns its figures.

    Raises:
      RuntimeError: the command failed, or some of its requests did.
    """
    words = [
        *("bench", "serve", "--url", url, "--json", "--seed", str(seed)),
        *("--input-len", str(PROMPT_TOKENS), "--output-len", str(new_tokens)),
        *("--num-requests", str(count), "--concurrency", str(concurrency)),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "dsv3_jax", *words], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"dsv3 bench: status {done.returncode}: {done.stderr[-2000:]}")
    figures = json.loads(done.stdout)
    if figures["completed"] != count:
        raise RuntimeError(f"dsv3 bench: expected {count} answers, got {figures['completed']}")
    return {name: figures[name] for name in FIGURES}


def theirs(
    command: str, url: str, count: int, concurrency: int, new_tokens: int
) -> dict[str, float]:
    """Sends the requests with aiperf, and returns its figures.

    Raises:
      RuntimeError: aiperf failed, or some of its requests did.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *("profile", "--model", "demo", "--url", url, "--endpoint-type", "completions"),
            *(
                "--streaming",
                "--extra-inputs",
                "temperature:0",
                "--extra-inputs",
                "ignore_eos:true",
            ),
            *("--isl", str(PROMPT_TOKENS), "--isl-stddev", "0"),
            *("--osl", str(new_tokens), "--osl-stddev", "0"),
            *("--num-dataset-entries", str(count)),
            *("--tokenizer", str(DEMO)),
            *("--request-count", str(count), "--concurrency", str(concurrency)),
            *(
                "--use-server-token-count",
                "--no-gpu-telemetry",
                "--no-server-metrics",
                "--ui",
                "none",
                "--artifact-dir",
                folder,
            ),
        ]
        done = subprocess.run([command, *words], capture_output=True, text=True)
        exported = list(Path(folder).rglob("profile_export_aiperf.json"))
        if done.returncode or not exported:
            raise RuntimeError(
                f"aiperf: status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
            )
        figures = json.loads(exported[0].read_text("utf-8"))
    answers = figures["request_count"]["avg"]
    if answers != count:
        raise RuntimeError(f"aiperf: expected {count} answers, got {answers}")
    return {name: figures[metric][statistic] for name, (metric, statistic) in FIGURES.items()}


def measure(engine: Engine, url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of both clients, round by round, and the ratios of their medians."""
    clients: dict[str, list[dict[str, float]]] = {"dsv3_bench": [], "aiperf": []}
    load = url, arguments.count, arguments.concurrency, arguments.new_tokens
    ours(url, arguments.concurrency, arguments.concurrency, 2, 0)
    for number in range(1, arguments.rounds + 1):
        for name, figures in clients.items():
            engine.clear_prefix_cache()
            gc.collect()
            got = theirs(arguments.aiperf, *load) if name == "aiperf" else ours(*load, number)
            figures.append({figure: round(value, 3) for figure, value in got.items()})
    medians = {
        name: {figure: statistics.median(each[figure] for each in rounds) for figure in FIGURES}
        for name, rounds in clients.items()
    }
    ratios = {
        figure: round(medians["aiperf"][figure] / medians["dsv3_bench"][figure], 3)
        for figure in FIGURES
    }
    return {"aiperf_over_dsv3_bench": ratios, "rounds": clients}


def main(words: Sequence[str]) -> int:
    arguments = parse(words)
    if shutil.which(arguments.aiperf) is None:
        print(f"--aiperf: expected a command, got {arguments.aiperf!r}", file=sys.stderr)
        return 2
    # The server's tokenizer may add a token to a text.
    max_len = PROMPT_TOKENS + arguments.new_tokens + 8
    engine, tokenizer = sleeping_engine(arguments.concurrency, max_len, arguments.step_ms / 1e3)
    with serving_in_a_process(
        engine, tokenizer, "demo", max_requests=2 * arguments.concurrency, max_len=max_len
    ) as url:
        figures = measure(engine, url, arguments)
    version = subprocess.run([arguments.aiperf, "--version"], capture_output=True, text=True)
    result = {
        **machine.description(),
        "aiperf": version.stdout.strip(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "count": arguments.count,
        "concurrency": arguments.concurrency,
        "new_tokens": arguments.new_tokens,
        "device_ms": arguments.step_ms,
        **figures,
    }
    if arguments.out:
        atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
