"""Runs an engine at full load and looks for what grows.

The load comes in rounds. After each the engine is idle, its prefix cache is emptied, and everything
that could have grown is counted. The first round fills caches and buffers, and later ones are
compared with the second: what a served request leaves behind then shows as growth.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dsv3_jax.engine import Engine, EngineRequest, QueueFullError

MAX_OBJECTS_PER_REQUEST = 1.0
"""Python objects that a request may leave behind on average. A leaked handle is many."""
MIN_REQUESTS = 24
"""Requests of each round, however slow the machine is."""
MAX_RSS_GROWTH = 0.03
"""Growth of the process's memory that fragmentation explains."""


@dataclasses.dataclass(frozen=True)
class Count:
    """Counts of what exists while the engine is idle, after a round."""

    seconds: float
    requests: int
    """Requests submitted so far."""
    output_tokens: int
    handles: int
    """Handles of requests that are still alive. The load keeps none."""
    objects: int
    """Python objects that the garbage collector tracks."""
    arrays: int
    """Arrays on all devices."""
    device_bytes: int
    """Bytes of these arrays, or what the device reports."""
    rss_bytes: int
    """Resident memory of the process; 0 where /proc does not exist."""
    threads: int
    cache_usage: float


def soak(
    engine: Engine, seconds: float, *, vocab_size: int, max_len: int, rounds: int
) -> list[Count]:
    """Runs rounds of random requests on an engine with a thread, and counts after each.

    Integrity is checked during the load, too. Some requests are cancelled, some have a short time
    limit, and many prompts begin alike.

    Raises:
      AssertionError: pages, slots, queues or handles contradict each other.
    """
    random = np.random.default_rng(0)
    handles: weakref.WeakSet[EngineRequest] = weakref.WeakSet()
    began = time.monotonic()
    counts: list[Count] = []
    submitted = 0
    for _ in range(rounds):
        submitted += _load(
            engine,
            random,
            handles,
            seconds=seconds / rounds,
            vocab_size=vocab_size,
            max_len=max_len,
        )
        engine.check_integrity()
        engine.clear_prefix_cache()
        end = time.monotonic() + 20
        while handles and time.monotonic() < end:  # threads leave the last ones a little later
            time.sleep(0.005)
        counts.append(_count(engine, time.monotonic() - began, submitted, len(handles)))
    return counts


def growth(counts: list[Count]) -> list[str]:
    """Returns a line for each thing that is left behind or grows."""
    before, after = counts[1], counts[-1]
    requests = max(after.requests - before.requests, 1)
    lines = [
        f"{name}: expected {expected}, got {got}"
        for name, expected, got in (
            ("handles", 0, after.handles),
            ("cache_usage", 0.0, after.cache_usage),
            ("arrays", before.arrays, after.arrays),
            ("threads", before.threads, after.threads),
        )
        if got != expected
    ]
    if (each := (after.objects - before.objects) / requests) > MAX_OBJECTS_PER_REQUEST:
        lines.append(f"objects: expected at most 1 more per request, got {each:.1f}")
    for name, most in (("device_bytes", 0.0), ("rss_bytes", MAX_RSS_GROWTH)):
        old, new = getattr(before, name), getattr(after, name)
        if new > old * (1 + most):
            lines.append(f"{name}: expected at most {old * (1 + most):.0f}, got {new}")
    return lines


def _load(
    engine: Engine,
    random: np.random.Generator,
    handles: weakref.WeakSet[EngineRequest],
    *,
    seconds: float,
    vocab_size: int,
    max_len: int,
) -> int:
    """Keeps the waiting queue filled for a time, and longer if there were too few requests, then
    waits for all of them. Returns their number."""
    until = time.monotonic() + seconds
    shared = random.integers(10, vocab_size, max_len // 2)
    running: list[EngineRequest] = []
    count = 0
    while (loading := count < MIN_REQUESTS or time.monotonic() < until) or running:
        while loading and engine.stats().waiting < 8:
            prompt = random.integers(10, vocab_size, int(random.integers(1, max_len // 2)))
            if random.random() < 0.5:
                prompt[: len(prompt) // 2] = shared[: len(prompt) // 2]
            try:
                request = engine.submit(prompt.tolist(), **_settings(random, max_len))
            except QueueFullError:
                break
            handles.add(request)
            running.append(request)
            count += 1
            if random.random() < 0.1:
                running[int(random.integers(len(running)))].cancel()
            del request
            loading = count < MIN_REQUESTS or time.monotonic() < until
        engine.check_integrity()
        running = [request for request in running if not request.is_done]
        time.sleep(0.005)
    return count


def _settings(random: np.random.Generator, max_len: int) -> dict[str, Any]:
    return {
        "max_new_tokens": int(random.integers(1, max_len // 2)),
        "ignore_eos": True,
        "temperature": float(random.choice([0.0, 0.8])),
        "priority": int(random.integers(-1, 2)),
        "timeout": float(random.choice([0.02, 60.0], p=[0.05, 0.95])),
        "draft": bool(random.integers(2)),
    }


def _count(engine: Engine, seconds: float, requests: int, handles: int) -> Count:
    gc.collect()
    arrays = jax.live_arrays()
    reported = jax.local_devices()[0].memory_stats() or {}
    stats = engine.stats()
    return Count(
        seconds=round(seconds, 2),
        requests=requests,
        output_tokens=stats.output_tokens,
        handles=handles,
        objects=len(gc.get_objects()),
        arrays=len(arrays),
        device_bytes=reported.get("bytes_in_use", sum(array.nbytes for array in arrays)),
        rss_bytes=_rss_bytes(),
        threads=threading.active_count(),
        cache_usage=stats.cache_usage,
    )


def _rss_bytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return 1024 * int(lines["VmRSS"].split()[0])
