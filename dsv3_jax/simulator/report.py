"""Figures of a simulation: throughput, latencies, service levels, and what limits them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from dsv3_jax.simulator.cluster import Outcome, PoolSettings
from dsv3_jax.simulator.replica import Replica

PERCENTILES = (50, 90, 99)

_OFTEN = 0.2  # share of the time with waiting requests from which they limit a pool


@dataclasses.dataclass(frozen=True)
class ServiceLevel:
    """Targets of a request, in seconds; None for no target."""

    ttft: float | None = None
    tpot: float | None = None  # target of the mean time between the tokens of a request


def summary(outcome: Outcome, level: ServiceLevel | None = None) -> dict[str, Any]:
    """Returns the figures as JSON. Latencies are in milliseconds, rates are per second."""
    served, seconds = outcome.requests, outcome.seconds
    ttft = np.array([each.ttft for each in served])
    tpot = np.array([each.tpot for each in served])
    tpot = tpot[~np.isnan(tpot)]
    pools = outcome.settings.pools
    nodes = sum(pool.replicas * pool.nodes for pool in pools.values())
    result = {
        "seconds": round(seconds, 3),
        "requests": outcome.submitted,
        "finished": len(served),
        "nodes": nodes,
        "devices": sum(pool.replicas * pool.devices for pool in pools.values()),
        "ttft_ms": _percentiles(ttft),
        "tpot_ms": _percentiles(tpot),
        "attainment": _attainment(outcome, level or ServiceLevel()),
        "pools": {
            name: _pool(pool, outcome.replicas[name], seconds) for name, pool in pools.items()
        },
    }
    output = sum(r.figures.output_tokens for rs in outcome.replicas.values() for r in rs)
    prompt = sum(r.figures.prompt_tokens for rs in outcome.replicas.values() for r in rs)
    hits = sum(r.figures.hit_tokens for rs in outcome.replicas.values() for r in rs)
    result |= {
        "output_tokens_per_second": round(output / seconds, 1),
        "output_tokens_per_second_per_node": round(output / seconds / nodes, 1),
        "prompt_tokens_per_second": round((prompt + hits) / seconds, 1),
        "prompt_tokens_computed_per_second": round(prompt / seconds, 1),
        "limit": _limit(result["pools"]),
    }
    return result


def _pool(settings: PoolSettings, replicas: list[Replica], seconds: float) -> dict[str, Any]:
    figures = [replica.figures for replica in replicas]
    nodes, devices = settings.replicas * settings.nodes, settings.replicas * settings.devices
    busy = sum(each.device_seconds for each in figures)
    computed = sum(each.prompt_tokens for each in figures)
    prompt = computed + sum(each.hit_tokens for each in figures)
    output = sum(each.output_tokens for each in figures)
    return {
        "replicas": settings.replicas,
        "nodes": nodes,
        "busy": round(min(1.0, busy / seconds / settings.replicas), 4),
        "running_per_device": round(
            sum(each.running_seconds for each in figures) / seconds / devices, 2
        ),
        "steps": sum(each.steps for each in figures),
        "ms_per_step": round(1e3 * busy / max(sum(each.steps for each in figures), 1), 3),
        "prompt_tokens_per_second_per_node": round(prompt / seconds / nodes, 1),
        "computed_tokens_per_second_per_node": round(computed / seconds / nodes, 1),
        "output_tokens_per_second_per_node": round(output / seconds / nodes, 1),
        "preemptions": sum(replica.scheduler.preemptions for replica in replicas),
        "bound_by": _shares([each.bound_by for each in figures], busy),
        "waits_for": _shares([each.waits_for for each in figures], busy),
    }


def _shares(parts: list[dict[str, float]], total: float) -> dict[str, float]:
    """Returns shares of ``total`` by name, the largest first."""
    merged = {
        name: sum(each.get(name, 0.0) for each in parts) for name in {n for p in parts for n in p}
    }
    order = sorted(merged, key=lambda name: (-merged[name], name))
    return {name: round(merged[name] / total, 4) for name in order}


def _percentiles(seconds: np.ndarray) -> dict[str, float]:
    if not seconds.size:
        return {}
    values = 1e3 * np.percentile(seconds, PERCENTILES)
    return {f"p{p}": round(float(v), 2) for p, v in zip(PERCENTILES, values, strict=True)}


def _attainment(outcome: Outcome, level: ServiceLevel) -> dict[str, float]:
    """Returns the share of requests that have met each target, and both. Requests that have not
    ended count by their time so far, except those whose first token may still come in time."""
    late = [r for r in outcome.open if r.first_token != r.first_token]
    if level.ttft is not None:
        late = [r for r in late if r.end - r.submitted > level.ttft]
    begun = [r for r in outcome.open if r.first_token == r.first_token]
    requests = [*outcome.requests, *begun]
    met = {
        "ttft": [level.ttft is None or r.ttft <= level.ttft for r in requests],
        "tpot": [level.tpot is None or not r.tpot > level.tpot for r in requests],
    }
    met["both"] = [all(each) for each in zip(*met.values(), strict=True)]
    total = max(len(requests) + len(late), 1)
    return {name: round(sum(values) / total, 4) for name, values in met.items()}


def _limit(pools: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns what limits the cluster, in a few words: what requests wait for most of the time, and
    the resource that takes longest in a step."""
    lack = {"slots": "request slots", "pages": "cache pages", "budget": "prefill budget"}
    name = max(pools, key=lambda name: sum(pools[name]["waits_for"].values()))
    bound = next(iter(pools[name]["bound_by"]), "nothing")
    waits = next(iter(pools[name]["waits_for"].items()), None)
    if waits is None or waits[1] < _OFTEN:
        return f"requests seldom wait; steps are bound by {bound}"
    return f"{name}: requests wait for {lack[waits[0]]}; steps are bound by {bound}"
