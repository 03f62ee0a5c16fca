"""Checks and times the barrier across a grid on a Hopper GPU, in about a minute.

    python -m scripts.bench_grid_barrier [--barriers 1000000] [--out FILE]

A JSON object says, for each number of programs: microseconds per barrier, alone and with a word
from each program to all others; and how many wrong words ``--barriers`` barriers have exchanged, in
launches that share a counter which nothing resets. A child process shows that a barrier at which a
program is missing ends with a message rather than a hang. Times are the host's, of launches of two
lengths: their difference excludes the launch. They are medians over several pairs of launches.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.decode.machine import description
from benchmarks.grid_barrier import grid_barrier
from dsv3_jax.files import atomic_write
from pallas_kernels.hopper import multiprocessors, require_hopper
from pallas_kernels.hopper.grid_barrier import new_counter

ROUNDS = 20_000  # barriers of the longer launch; the shorter one has a tenth
PAIRS = 7
CHECKED_ROUNDS = 5_000  # barriers per launch while words are checked
FEW_POLLS = 1 << 16  # of the barrier that traps
TRAP_SECONDS = 60
MESSAGE = re.compile(r"grid barrier: after \d+ polls, program \d+ still waits.*")


def seconds_of(rounds: int, programs: int, checked: bool, counter: jax.Array) -> Any:
    """Returns the seconds of a launch, and the counter."""
    began = time.perf_counter()
    wrong, counter = grid_barrier(counter, programs=programs, rounds=rounds, checked=checked)
    jax.block_until_ready((wrong, counter))
    return time.perf_counter() - began, counter


def microseconds(programs: int, checked: bool) -> dict[str, float]:
    """Returns the median time of a barrier, and the spread of the measurements."""
    counter, measured = new_counter(), []
    for pair in range(PAIRS + 1):
        short, counter = seconds_of(ROUNDS // 10, programs, checked, counter)
        long, counter = seconds_of(ROUNDS, programs, checked, counter)
        if pair:  # the first pair compiles
            measured.append((long - short) / (ROUNDS - ROUNDS // 10) * 1e6)
    median = statistics.median(measured)
    spread = (max(measured) - min(measured)) / median
    return {"us": round(median, 3), "spread": round(spread, 3)}


def check(programs: int, barriers: int) -> dict[str, Any]:
    """Counts the wrong words of many launches that share a counter."""
    counter, total, launches = new_counter(), 0, -(-barriers // CHECKED_ROUNDS)
    began = time.perf_counter()
    for _ in range(launches):
        wrong, counter = grid_barrier(counter, programs=programs, rounds=CHECKED_ROUNDS)
        total += int(wrong.sum())
    seconds = round(time.perf_counter() - began, 1)
    return {"barriers": launches * CHECKED_ROUNDS, "wrong_words": total, "seconds": seconds}


def trap() -> dict[str, Any]:
    """Runs a barrier that one program skips in a child process, whose GPU context it ends."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "scripts.bench_grid_barrier", "--skip-one"]
    # This process has most of the GPU's memory.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=TRAP_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:  # which has killed the child
        return {"exit_status": None, "message": None, "seconds": TRAP_SECONDS}
    output = child.stdout + child.stderr
    message = MESSAGE.search(output)
    return {
        "exit_status": child.returncode,
        "message": message[0] if message else None,
        "last_lines": [] if message else output.splitlines()[-5:],
        "seconds": round(time.perf_counter() - began, 1),
    }


def skip_one(programs: int) -> None:
    """Runs barriers. One program skips the last."""
    wrong, _ = grid_barrier(
        new_counter(), programs=programs, rounds=3, absent=1, most_polls=FEW_POLLS
    )
    jax.block_until_ready(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and time the barrier across a grid.")
    parser.add_argument("--barriers", type=int, default=1_000_000, help="barriers to check")
    parser.add_argument("--out", type=Path, help="JSON file; by default it is only printed")
    parser.add_argument("--skip-one", action="store_true", help="trap, as the child process does")
    arguments = parser.parse_args()
    require_hopper()
    most = multiprocessors()
    if arguments.skip_one:
        skip_one(most)
        return
    result: dict[str, Any] = description() | {"programs": {}}

    def save() -> None:
        if arguments.out is not None:
            atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")

    for programs in (most, most // 2, 2):
        result["programs"][programs] = {
            "barrier": microseconds(programs, checked=False),
            "barrier_and_words": microseconds(programs, checked=True),
        }
        print(programs, result["programs"][programs], flush=True)
        save()
    result["check"] = check(most, arguments.barriers)
    print(result["check"], flush=True)
    save()
    result["trap"] = trap()
    print(json.dumps(result))
    save()
    faults = [
        f"{result['check']['wrong_words']} wrong words" * bool(result["check"]["wrong_words"]),
        "a missing program gave no message" * (result["trap"]["message"] is None),
        "a missing program gave no error" * (result["trap"]["exit_status"] == 0),
        f"no trap within {TRAP_SECONDS} s" * (result["trap"]["exit_status"] is None),
    ]
    if any(faults):
        sys.exit("; ".join(fault for fault in faults if fault))


if __name__ == "__main__":
    main()
