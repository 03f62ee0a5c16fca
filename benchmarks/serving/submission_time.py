"""Measures how long a client's thread is busy with the submission of a trace's requests.

    python -m benchmarks.serving.submission_time --commits 4794243 03dc8c4 dde8d4d \\
        --out benchmarks/results/submission_time.json

measures the engine of each commit, in a copy of its files. Nothing runs meanwhile: the engine has
no thread and takes no step. The model is tiny, since prompts are token ids, whose checks do not
depend on it. Python's threads share one interpreter, so that a client in the engine's process keeps
the engine from launching steps for about this long.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import dsv3_jax
from dsv3_jax.engine import Engine
from dsv3_jax.traces import TRACES
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint

ROUNDS = 5
MAX_LEN = 5120


def measure(trace_name: str) -> dict[str, float]:
    """Returns the processor time of the fastest of some rounds, and what was submitted."""
    trace = TRACES[trace_name]()
    prompts = [trace.prompt(i, 64) for i in range(len(trace.requests))]
    with tempfile.TemporaryDirectory() as directory:
        config = tiny_config(num_hidden_layers=1, max_position_embeddings=MAX_LEN)
        write_checkpoint(Path(directory), config, random_tensors(config))
        model = dsv3_jax.load(directory)[0]
    seconds = []
    for _ in range(ROUNDS):
        engine = Engine(
            model,
            None,
            MAX_LEN,
            max_running=1,
            cache_tokens=MAX_LEN,
            background=False,
            max_waiting=len(prompts),
        )
        gc.collect()
        began = time.thread_time()
        for prompt, request in zip(prompts, trace.requests, strict=True):
            engine.submit(prompt, max_new_tokens=request.output_tokens, ignore_eos=True)
        seconds.append(time.thread_time() - began)
        engine.shutdown(drain=False)
    tokens = sum(map(len, prompts))
    return {"requests": len(prompts), "prompt_tokens": tokens, "seconds": round(min(seconds), 4)}


def measure_commit(commit: str) -> dict[str, Any]:
    """Returns the figures of each trace with the files of a commit."""
    with tempfile.TemporaryDirectory() as directory:
        archive = subprocess.run(["git", "archive", commit], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", directory], input=archive.stdout, check=True)
        run = subprocess.run(
            [sys.executable, Path(__file__).absolute()],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": directory, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
    if run.returncode:
        raise RuntimeError(f"{commit}: expected a measurement, got {run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure the submission of requests.")
    parser.add_argument("--commits", nargs="+", help="measure these; default: the files here")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.commits:
        result = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()} CPU, {os.cpu_count()} cores",
            "load_average": round(os.getloadavg()[0], 1),
            "command": "python -m benchmarks.serving.submission_time --commits "
            + " ".join(arguments.commits),
            "commits": {commit: measure_commit(commit) for commit in arguments.commits},
        }
    else:
        result = {name: measure(name) for name in ("chat", "prefixed")}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
