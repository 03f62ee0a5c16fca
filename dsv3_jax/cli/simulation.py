"""The part of ``dsv3 plan --serve --trace`` that simulates."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

from dsv3_jax.cli.loading import latency_targets
from dsv3_jax.cli.output import print_json
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.roofline import cached_token_bytes
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.weights import ShardCache
from dsv3_jax.simulator.cluster import Cluster, ClusterSettings, PoolPlan, PoolSettings
from dsv3_jax.simulator.measured_run import MeasuredRun
from dsv3_jax.simulator.report import ServiceLevel, summary
from dsv3_jax.simulator.step_times import Efficiency
from dsv3_jax.simulator.workload import Arrival, Lengths, poisson, replayed
from dsv3_jax.traces import TRACES

_SIGMA = 0.9  # of the lengths of the poisson trace, as of prompts in the chat trace
_CALIBRATIONS = ("chat", 24.0), ("chat", None)
"""Replays of a measured table: the first gives step times, and both together the host's time."""
_DISK_BYTES_PER_S = 40 * 2**30
_MOST_PROMPT_SHARE = 0.75  # of the longest request


def check(arguments: argparse.Namespace) -> None:
    """Raises ValueError for settings that do not go together or are out of range."""
    if not arguments.trace:
        for name in ("control", "step_times", "prefill_target", "rate"):
            if getattr(arguments, name):
                raise ValueError(f"--{name.replace('_', '-')}: expected --trace too")
        return
    if not arguments.serve:
        raise ValueError("--trace: expected --serve too")
    if arguments.trace == "poisson" and arguments.rate is None:
        raise ValueError("--rate: expected requests per second with --trace poisson, got none")
    if arguments.step_times and arguments.prefill_target:
        raise ValueError("--step-times: expected one pool, got --prefill-target too")
    for flag, least in (("rate", 0), ("seconds", 0), ("replicas", 1), ("prefill_replicas", 1)):
        value = getattr(arguments, flag)
        if value is not None and not (value >= least if least else value > 0):
            name = flag.replace("_", "-")
            raise ValueError(f"--{name}: expected {least or 'a number above 0'}, got {value}")
    for flag in ("hit_share", "acceptance"):
        if not 0 <= getattr(arguments, flag) <= 1:
            name = flag.replace("_", "-")
            raise ValueError(f"--{name}: expected 0 to 1, got {getattr(arguments, flag)}")
    if latency_targets(arguments) is None and arguments.control:
        raise ValueError(
            "--control: expected --target-ttft-ms or --target-tpot-ms too, got neither"
        )


def run(arguments: argparse.Namespace, deployment: Deployment) -> None:
    """Simulates and prints the figures."""
    began = time.process_time()
    settings = _cluster(arguments, deployment)
    warm_up = until = 0.0
    if arguments.trace == "poisson":
        until, warm_up = arguments.seconds, arguments.seconds / 3
    outcome = Cluster(settings).run(
        _arrivals(arguments, deployment), until=until or None, warm_up=warm_up
    )
    level = latency_targets(arguments)
    figures = summary(outcome, ServiceLevel(level.ttft, level.tpot) if level else None)
    figures["cpu_seconds"] = round(time.process_time() - began, 2)
    if arguments.json:
        print_json({"model": arguments.model, "target": deployment.target.name, **figures})
    else:
        at_best = not arguments.step_times and tuple(arguments.reached) == (1, 1, 1)
        print("\n".join(lines(figures, at_best=at_best)))


def lines(figures: Mapping[str, Any], *, at_best: bool) -> list[str]:
    """Returns the lines of the report. ``at_best``: steps are as fast as the peak rates allow,
    which no program is."""
    ttft, tpot = figures["ttft_ms"], figures["tpot_ms"]
    best = " at best" if at_best else ""
    text = [
        f"{figures['finished']:,} of {figures['requests']:,} requests in"
        f" {figures['seconds']:,.1f} simulated seconds, on {figures['nodes']:g} nodes"
        f" ({figures['devices']} devices)",
        f"  output tokens/s           {figures['output_tokens_per_second']:>12,.0f}",
        f"  output tokens/s per node  {figures['output_tokens_per_second_per_node']:>12,.0f}",
        f"  prompt tokens/s           {figures['prompt_tokens_per_second']:>12,.0f}",
        f"  TTFT{best}, ms: {_percentiles(ttft)}",
        f"  TPOT{best}, ms: {_percentiles(tpot)}",
        f"  targets met by {figures['attainment']['both']:.1%} of the requests",
        f"  limit: {figures['limit']}",
    ]
    for name, pool in figures["pools"].items():
        bound = ", ".join(f"{what} {share:.0%}" for what, share in pool["bound_by"].items())
        text.append(
            f"  {name}: busy {pool['busy']:.0%}, {pool['running_per_device']:,.1f} requests per"
            f" device, {pool['ms_per_step']:.1f} ms per step (bound by {bound})"
        )
    return text


def _percentiles(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:,.1f}" for name, value in values.items()) or "none finished"


def _cluster(arguments: argparse.Namespace, deployment: Deployment) -> ClusterSettings:
    shards = ShardCache()
    per_token = cached_token_bytes(deployment)
    disk = per_token / _DISK_BYTES_PER_S
    efficiency = Efficiency(*arguments.reached)
    is_split = arguments.prefill_target is not None
    is_stored = arguments.hit_share > 0
    if arguments.step_times:
        pool = _measured_pool(arguments, deployment)
    else:
        pool = PoolPlan(
            deployment,
            arguments.replicas,
            efficiency,
            arguments.acceptance,
            stored_prompts=is_stored and not is_split,
            resumes=is_split,
        ).settings(shards)
    if arguments.control:
        engine = dataclasses.replace(pool.engine, targets=latency_targets(arguments))
        pool = dataclasses.replace(pool, engine=engine)
    if not is_split:
        return ClusterSettings(pool, disk_seconds_per_token=disk)
    other = dataclasses.replace(
        deployment,
        target=Target.parse(arguments.prefill_target),
        layout_name=arguments.prefill_layout or deployment.layout_name,
        mtp=False,
    )
    prefill = PoolPlan(
        other, arguments.prefill_replicas, efficiency, stored_prompts=is_stored
    ).settings(shards)
    chip = deployment.target.chip
    link = chip.internode_bandwidth or chip.link_bandwidth
    return ClusterSettings(pool, prefill, per_token / (efficiency.network * link), disk)


def _measured_pool(arguments: argparse.Namespace, deployment: Deployment) -> PoolSettings:
    measured = MeasuredRun.read(arguments.step_times)
    expected = measured.model_name, measured.target
    if expected != (got := (arguments.model, deployment.target.name)):
        raise ValueError(
            f"--step-times: expected {expected[0]} on {expected[1]}, which were measured, got"
            f" {got[0]} on {got[1]}"
        )
    calibration, offline = (measured.find(*each) for each in _CALIBRATIONS)
    host = measured.host_costs(calibration, offline)
    times = measured.calibrated(calibration, host)
    slots = measured.engine.scheduler.max_running
    if deployment.batch != slots:
        raise ValueError(f"--batch: expected {slots}, the measured slots, got {deployment.batch}")
    engine = dataclasses.replace(measured.engine, host=host, stored_prompts=arguments.hit_share > 0)
    return PoolSettings(arguments.replicas, engine, times, devices=1, nodes=1 / 8)


def _arrivals(arguments: argparse.Namespace, deployment: Deployment) -> Iterator[Arrival]:
    if arguments.trace != "poisson":
        trace = TRACES[arguments.trace]()
        longest = max(r.prompt_tokens + r.output_tokens for r in trace.requests)
        if longest > deployment.context:
            raise ValueError(
                f"--context: expected at least {longest}, the longest request of the trace, got"
                f" {deployment.context}"
            )
        return replayed(trace, arguments.rate, arguments.requests, hit_share=arguments.hit_share)
    most_prompt = int(_MOST_PROMPT_SHARE * deployment.context)
    return poisson(
        lambda now: arguments.rate,
        arguments.rate,
        arguments.seconds,
        Lengths(arguments.mean_prompt, _SIGMA, most_prompt),
        Lengths(arguments.mean_output, _SIGMA, deployment.context - most_prompt),
        hit_share=arguments.hit_share,
        page_size=DEFAULT_PAGE_SIZE,
    )
