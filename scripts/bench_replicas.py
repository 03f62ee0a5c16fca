"""Measures replicas on Ray Serve: a killed one, a rolling restart, and a step of the load.

    python -m scripts.bench_replicas --seconds 20 --out benchmarks/results/replicas_cpu.json \\
        --picture docs/deploy/replicas.png

Needs the extras ``ray``, ``serve`` and ``plot``. Everything runs on this machine with the demo:

1. kill: 4 replicas serve 200 clients, and one of them is killed.
2. restart: 4 replicas serve 12 clients while all of them are replaced, one after the other.
3. step: the load goes from few clients to many and back; 1 to 4 replicas follow it.

Half of the requests ask for a stream. Latencies and throughput are those of this machine's cores,
which all replicas share, and say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.decode import machine
from benchmarks.serving import ray_cluster
from benchmarks.serving.replica_clients import Clients, Outcome
from benchmarks.serving.small_replica import SmallReplica
from dsv3_jax.files import atomic_write
from dsv3_jax.serve_ray.app import application
from dsv3_jax.serve_ray.settings import AppSettings

_APP = "bench"
_MAX_TOKENS = 24
_MAX_REPLICAS = 4

Sample = dict[str, float]


def app(store: Path, min_replicas: int, max_waiting: int = 64) -> Any:
    """Returns the application.

    Args:
      store: compiled programs, so that only the first replica compiles.
    """
    settings = AppSettings.of(
        {
            "serve": {"max_running": 8, "max_waiting": max_waiting, "program_store": store},
            "autoscaling": {
                "min_replicas": min_replicas,
                "max_replicas": _MAX_REPLICAS,
                "target_ongoing_requests": 8,
                "upscale_delay_s": 3,
                "downscale_delay_s": 10,
                "look_back_period_s": 12,
            },
            "health_check_period_s": 2,
        }
    )
    return application(settings, SmallReplica)


async def sampled(clients: Clients, seconds: float, samples: list[Sample]) -> None:
    """Takes a sample every second."""
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        running = await asyncio.to_thread(ray_cluster.running_replicas, _APP)
        samples.append({"time": now, "replicas": running, "open": clients.open})
        await asyncio.sleep(max(0.0, now + 1 - time.monotonic()))


async def until_running(clients: Clients, replicas: int, samples: list[Sample]) -> None:
    """Waits for a number of replicas, for four minutes at most."""
    end = time.monotonic() + 240
    while samples[-1]["replicas"] != replicas and time.monotonic() < end:
        await sampled(clients, 1, samples)


async def kill(clients: Clients, samples: list[Sample], seconds: float) -> dict[str, Any]:
    """Kills one of the replicas under load."""
    clients.set(200)
    await sampled(clients, seconds, samples)
    victim = ray_cluster.replica_processes(_APP)[0]
    killed = time.monotonic()
    ray_cluster.kill(victim)
    await sampled(clients, seconds, samples)
    await until_running(clients, _MAX_REPLICAS, samples)
    return {"clients": 200, "killed": killed}


async def restart(clients: Clients, samples: list[Sample], store: Path) -> dict[str, Any]:
    """Replaces all replicas under load, by a change of their settings."""
    before = set(ray_cluster.replica_processes(_APP))
    clients.set(12)
    await sampled(clients, 5, samples)
    began = time.monotonic()
    new = app(store, _MAX_REPLICAS, max_waiting=65)
    deployed = asyncio.create_task(asyncio.to_thread(ray_cluster.deploy, new, _APP))
    while not deployed.done() or before & set(ray_cluster.replica_processes(_APP)):
        await sampled(clients, 1, samples)
    await deployed
    return {"clients": 12, "replaced": len(before), "seconds": time.monotonic() - began}


async def step(clients: Clients, samples: list[Sample], seconds: float) -> dict[str, Any]:
    """Raises the load, and lowers it again."""
    changes = []
    for count in (2, 48, 2):
        changes.append({"time": time.monotonic(), "clients": count})
        clients.set(count)
        await sampled(clients, seconds, samples)
        await until_running(clients, _MAX_REPLICAS if count > 2 else 1, samples)
    await sampled(clients, 10, samples)
    return {"changes": changes}


def measure(url: str, script: Callable[[Clients, list[Sample]], Awaitable[dict[str, Any]]]) -> Any:
    """Runs a script with clients, and returns its figures with those of the requests."""
    samples: list[Sample] = []
    facts: dict[str, Any] = {}
    clients = Clients(url, max_tokens=_MAX_TOKENS)

    async def run(clients: Clients) -> None:
        facts.update(await script(clients, samples))

    began = time.monotonic()
    asyncio.run(clients.run(run))
    if "killed" in facts:
        facts["killed"] = round(facts["killed"] - began, 2)
    for each in facts.get("changes", []):
        each["time"] = round(each["time"] - began, 2)
    timeline = [{**s, "time": round(s["time"] - began, 2)} for s in changes(samples)]
    return {**facts, **summary(clients.outcomes), "timeline": timeline, **latencies(clients, began)}


def changes(samples: Sequence[Sample]) -> list[Sample]:
    """Returns the samples that differ from the one before or after them."""

    def values(sample: Sample) -> dict[str, float]:
        return {**sample, "time": 0}

    last = len(samples) - 1
    return [
        sample
        for i, sample in enumerate(samples)
        if i in (0, last)
        or values(sample) != values(samples[i - 1])
        or values(sample) != values(samples[i + 1])
    ]


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns how the requests ended."""
    failed = [each for each in outcomes if not each.is_complete]
    begun = [each for each in failed if each.status == 200 and each.has_begun]
    return {
        "requests": len(outcomes),
        "complete": len(outcomes) - len(failed),
        "sent_again_and_complete": sum(o.attempts > 1 and o.is_complete for o in outcomes),
        "streams_that_ended_with_an_error_event": len(begun),
        "streams_sent_again_by_the_client_and_complete": sum(
            each.is_repeat and each.is_complete for each in outcomes
        ),
        "failed_before_any_text": len(failed) - len(begun),
        "errors": dict(collections.Counter(each.error[:200] for each in failed)),
        "requests_of_each_replica": dict(collections.Counter(o.replica for o in outcomes)),
        "median_seconds": round(statistics.median(o.seconds for o in outcomes), 2),
        "longest_seconds": round(max(o.seconds for o in outcomes), 2),
    }


def latencies(clients: Clients, began: float) -> dict[str, Any]:
    """Returns the median time of the requests that ended in each ten seconds."""
    parts: dict[int, list[float]] = collections.defaultdict(list)
    for each in clients.outcomes:
        parts[int(each.start + each.seconds - began) // 10 * 10].append(each.seconds)
    return {
        "requests_by_time": [
            {"time": t, "ended": len(s), "median_seconds": round(statistics.median(s), 3)}
            for t, s in sorted(parts.items())
        ]
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws replicas and open requests over time."""
    from matplotlib.figure import Figure

    from dsv3_jax.viz import save

    parts = [name for name in ("kill", "restart", "step") if name in result]
    figure = Figure(figsize=(4.6 * len(parts), 3.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        timeline = result[name]["timeline"]
        times = [each["time"] for each in timeline]
        axes.plot(times, [each["open"] for each in timeline], color="#8a8f98", lw=1)
        axes.set(xlabel="seconds", ylabel="open requests", title=_TITLES[name], ylim=(0, None))
        replicas = axes.twinx()
        replicas.step(times, [each["replicas"] for each in timeline], where="post", color="#1f6feb")
        replicas.set(ylim=(0, _MAX_REPLICAS + 0.5), yticks=range(_MAX_REPLICAS + 1))
        replicas.set_ylabel("replicas", color="#1f6feb")
        if "killed" in result[name]:
            axes.axvline(result[name]["killed"], color="#d1242f", ls=":")
    save(figure, path)


_TITLES = {
    "kill": "one of 4 replicas is killed",
    "restart": "all replicas are replaced",
    "step": "a step of the load",
}


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Measure replicas on Ray Serve.")
    parser.add_argument("--parts", nargs="+", default=list(_TITLES), choices=list(_TITLES))
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each phase")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args(words)
    result = {
        **machine.description(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "command": "python -m scripts.bench_replicas " + " ".join(words),
    }
    with tempfile.TemporaryDirectory(prefix="ray") as directory:
        store = Path(directory) / "programs"
        with ray_cluster.cluster(Path(directory) / "r", _MAX_REPLICAS + 1) as url:
            result["versions"]["ray"] = ray_cluster.ray.__version__
            ray_cluster.deploy(app(store, 1), _APP)
            if set(arguments.parts) - {"step"}:
                ray_cluster.deploy(app(store, _MAX_REPLICAS), _APP)
            scripts = {
                "kill": lambda c, s: kill(c, s, arguments.seconds),
                "restart": lambda c, s: restart(c, s, store),
                "step": lambda c, s: step(c, s, arguments.seconds),
            }
            for name in arguments.parts:
                if name == "step":
                    ray_cluster.deploy(app(store, 1), _APP)
                result[name] = measure(url, scripts[name])
                if arguments.out:
                    atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")
    if arguments.picture:
        draw(result, arguments.picture)
    print(json.dumps({name: result[name] for name in arguments.parts}))
    return 0


if __name__ == "__main__":
    os.environ.update({**ray_cluster.ENVIRONMENT, **os.environ})
    sys.exit(main(sys.argv[1:]))
