"""Formats the results of ``dsv3 plan``, as tables and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from dsv3_jax.cli.allocator import SHARE
from dsv3_jax.plan.chips import CUDA
from dsv3_jax.plan.choice import OPEN_SETTINGS, Candidate, Choice
from dsv3_jax.plan.commands import commands
from dsv3_jax.plan.compiled import CompiledProgram, Phase
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.estimate import DoesNotFitError, Estimate
from dsv3_jax.plan.memory import LABELS, MemoryUse
from dsv3_jax.plan.roofline import Roofline
from dsv3_jax.plan.sweep import Point
from dsv3_jax.words import counted


def as_json(
    estimate: Estimate,
    model: str,
    choice: Choice | None,
    programs: dict[Phase, CompiledProgram],
    points: list[Point],
) -> dict[str, Any]:
    """Returns the JSON object of a deployment that fits, in bytes, seconds and tokens/s.

    Args:
      choice: the planner's choice of settings, or None if the layout was given.
      programs: the compiler's figures, empty without ``--compile``.
      points: bounds over batch sizes, empty without ``--sweep``.
    """
    return {
        **_needs(estimate.deployment, estimate.memory, model),
        "fits": True,
        "chosen": None
        if choice is None
        else {
            "because": choice.reason,
            "layouts": [_candidate(each) for each in choice.layouts],
        },
        "largest_batch": estimate.largest_batch,
        "largest_context": estimate.largest_context,
        "cache_tokens": None if estimate.cache is None else estimate.cache.tokens,
        "largest_cache_tokens": None if estimate.cache is None else estimate.cache.largest,
        "bounds": {phase: _bound(each) for phase, each in estimate.rooflines.items()},
        "tpot_seconds_at_best": _tpot(estimate),
        "ttft_seconds_at_best": estimate.rooflines["prefill"].seconds,
        "commands": commands(estimate.deployment, model),
        "compiled": {
            phase: dataclasses.asdict(each) | {"peak": each.peak}
            for phase, each in programs.items()
        },
        "sweep": [dataclasses.asdict(point) for point in points],
    }


def refusal_json(error: DoesNotFitError, model: str) -> dict[str, Any]:
    """Returns the JSON object of a deployment that does not fit.

    Its keys up to ``fits`` are those of :func:`as_json`.
    """
    part, nbytes = error.largest_part
    return {
        **_needs(error.deployment, error.memory, model),
        "fits": False,
        "missing_bytes": error.missing,
        "largest_part": {"name": part, "bytes": nbytes},
        "what_fits": list(error.remedies),
    }


def _needs(deployment: Deployment, memory: dict[str, MemoryUse], model: str) -> dict[str, Any]:
    return {
        "model": model,
        "target": deployment.target.name,
        "devices": deployment.target.devices,
        "hosts": deployment.target.hosts,
        "kernels": deployment.target.chip.has_kernels,
        "layout": deployment.layout_name,
        "serve": deployment.engine is not None,
        **{
            name: getattr(deployment, name)
            for name in (
                *("batch", "context", "quantization", "activations"),
                *("cache_dtype", "exchange"),
                *("float8_dispatch", "mtp", "redundant_experts", "prefill_chunk"),
            )
        },
        "memory_bytes": deployment.target.chip.memory,
        "peak_bytes": max(use.peak for use in memory.values()),
        "bytes": {
            phase: {**dataclasses.asdict(use), "peak": use.peak} for phase, use in memory.items()
        },
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    deployment = candidate.deployment
    settings = {name: getattr(deployment, name) for name in OPEN_SETTINGS if name != "layout_name"}
    return {
        "layout": deployment.layout_name,
        **settings,
        "fits": candidate.fits,
        "peak_bytes": candidate.peak,
        "step_seconds": candidate.step_seconds,
        "prefill_seconds": candidate.prefill_seconds,
        "seconds": candidate.seconds,
    }


def _bound(roofline: Roofline) -> dict[str, Any]:
    names = ("seconds", "binding", "tokens_per_s", "tokens_per_s_per_device")
    return dataclasses.asdict(roofline) | {name: getattr(roofline, name) for name in names}


def table(estimate: Estimate, model: str, choice: Choice | None) -> list[str]:
    """Returns the lines of the report on a deployment that fits."""
    deployment = estimate.deployment
    lines = [f"{title(deployment, model)}: {_sequences(deployment)}"]
    if choice is not None:
        lines.append(f"layout: {choice.reason}")
    lines += [
        *_note(deployment),
        "",
        *_memory(deployment, estimate.memory),
        "",
        f"largest batch at this context         {estimate.largest_batch:>22,}",
        f"largest context at this batch         {estimate.largest_context:>22,}",
        *_cache(estimate),
        "",
        f"{'lower bounds in ms':36}{'decode step':>12}{'prefill':>12}",
    ]
    step, prompts = estimate.rooflines["decode"], estimate.rooflines["prefill"]
    for name, label in (
        ("weights", "reading weights"),
        ("cache", "reading the cache"),
        ("arithmetic", "arithmetic"),
        ("network", "network"),
        ("seconds", "longest; weights and cache added"),
    ):
        a, b = getattr(step, name), getattr(prompts, name)
        lines.append(f"  {label:34}{1e3 * a:12.2f}{1e3 * b:12.2f}")
    lines += [
        f"  {'bound by':34}{step.binding:>12}{prompts.binding:>12}",
        f"  {'tokens/s of all devices, at most':34}"
        f"{step.tokens_per_s:12,.0f}{prompts.tokens_per_s:12,.0f}",
        f"  {'tokens/s per device, at most':34}"
        f"{step.tokens_per_s_per_device:12,.0f}{prompts.tokens_per_s_per_device:12,.0f}",
        "",
        f"at best: TPOT {1e3 * _tpot(estimate):,.2f} ms; TTFT {1e3 * prompts.seconds:,.0f} ms if"
        " all prompts arrive at once. Published systems reach 17 % to 43 % of such bounds",
    ]
    return lines


def how_to_run(estimate: Estimate, model: str) -> list[str]:
    """Returns the lines with the number of hosts and the commands."""
    deployment, target = estimate.deployment, estimate.deployment.target
    device = "GPU" if target.platform == "gpu" else "device"
    each = f" with {counted(target.devices_of_host, device)} each" if target.hosts > 1 else ""
    where = ", on a Ray cluster of these hosts" if target.hosts > 1 else ""
    lines = [
        f"hosts: {target.hosts:,}{each}",
        f"to serve it{where}:",
        *(f"  {command}" for command in commands(deployment, model)),
    ]
    if deployment.engine is None:
        lines.append("with --serve, the plan is for the engine of this server")
    if deployment.redundant_experts:
        lines.append("redundant experts are set in Python: dsv3_jax.load(placement=...)")
    if target.platform == "gpu":
        share = int(SHARE * (target.chip.memory + CUDA))
        if estimate.peak > share:
            lines.append(
                f"the command lets JAX use {SHARE:.0%} of a GPU, {share / 1e9:.2f} GB, which is"
                f" less than the peak: plan for a smaller --batch, or set XLA_CLIENT_MEM_FRACTION"
            )
    return lines


def _tpot(estimate: Estimate) -> float:
    """Returns the lower bound on the time between two tokens of a request, in seconds."""
    return estimate.rooflines["decode"].seconds / (1 + estimate.deployment.draft_depth)


def refusal(error: DoesNotFitError, model: str) -> list[str]:
    """Returns the lines of the report on a deployment that does not fit."""
    deployment = error.deployment
    part, nbytes = error.largest_part
    verb = "does" if deployment.batch == 1 or deployment.engine else "do"
    name, smallest = title(deployment, model), []
    if error.num_layouts:
        # The layout of these figures is not the reason.
        name = name.removesuffix(f", {deployment.layout_name}")
        smallest = [
            "",
            f"in none of the {counted(error.num_layouts, 'layout')} that run here. The smallest"
            f" peak is of {deployment.layout_name}:",
        ]
    available = deployment.target.chip.memory
    return [
        f"{name}: {_sequences(deployment)} {verb} not fit",
        *_note(deployment),
        *smallest,
        "",
        *_memory(deployment, error.memory),
        "",
        f"too much: {error.missing / 1e9:.2f} GB per device; the largest part is {part},"
        f" {nbytes / 1e9:.2f} GB"
        + (
            f", which alone is more than the {available / 1e9:.2f} GB available"
            * (nbytes > available)
        ),
        "any of these, added to the command, fits:"
        if error.remedies
        else "no change of settings that the planner tries fits",
        *(f"  {each}" for each in error.remedies),
    ]


def _cache(estimate: Estimate) -> list[str]:
    if estimate.cache is None:
        return []
    return [
        f"tokens in the cache of all requests   {estimate.cache.tokens:>22,}",
        f"largest cache that fits, in tokens    {estimate.cache.largest:>22,}",
    ]


def _memory(deployment: Deployment, memory: dict[str, MemoryUse]) -> list[str]:
    lines = [f"{'GB per device':36}" + "".join(f"{phase:>12}" for phase in memory)]

    def line(label: str, values: list[int]) -> str:
        return f"  {label:34}" + "".join(f"{value / 1e9:12.2f}" for value in values)

    for name, label in LABELS.items():
        values = [getattr(use, name) for use in memory.values()]
        if any(values):
            lines.append(line(label, values))
    return [
        *lines,
        line("peak", [use.peak for use in memory.values()]),
        line("available", [deployment.target.chip.memory] * len(memory)),
    ]


def _note(deployment: Deployment) -> list[str]:
    """Returns the limits of the figures for chips or attention that this project has no kernels
    for."""
    if deployment.target.chip.has_kernels:
        if not deployment.config.has_indexer:
            return []
        if deployment.target.platform == "gpu":
            return [
                "note: programs with sparse attention have been timed with eight layers only, on"
                " one H200; docs/benchmarks.md has the share of peak bandwidth that they reached"
            ]
        return [
            "note: this project has no kernels for sparse attention and uses plain XLA for it. No"
            " program comes near these bounds"
        ]
    return [
        f"note: this project has no kernels for {deployment.target.kind} and uses plain XLA there."
        " The workspace is an estimate, and no program comes near these bounds"
    ]


def title(deployment: Deployment, model: str) -> str:
    """Returns the model, its precision, the devices and the layout, in one line."""
    target, layout = deployment.target, deployment.layout_name
    devices = counted(target.devices, "device")
    return f"{model} in {deployment.quantization} on {target.name}, {devices}, {layout}"


def _sequences(deployment: Deployment) -> str:
    if deployment.engine is not None:
        requests = counted(deployment.batch, "running request")
        return f"an engine of {requests} of at most {counted(deployment.context, 'token')}"
    sequences = counted(deployment.batch, "sequence")
    return f"{sequences} of {counted(deployment.context, 'token')}"


def compiled_table(estimate: Estimate, programs: dict[Phase, CompiledProgram]) -> list[str]:
    """Returns the lines of the compiler's figures, and the ratio of the estimate to them."""
    compiled = list(programs.values())

    def line(label: str, cells: list[str]) -> str:
        return f"  {label:34}" + "".join(f"{cell:>12}" for cell in cells)

    def gb(nbytes: int) -> str:
        return f"{nbytes / 1e9:.2f}"

    ratios = [estimate.memory[phase].peak / each.peak for phase, each in programs.items()]
    return [
        f"{'GB per device, by the compiler':36}" + "".join(f"{phase:>12}" for phase in programs),
        line("weights, cache, counters", [gb(each.arguments) for each in compiled]),
        line("everything else", [gb(each.workspace) for each in compiled]),
        line("peak", [gb(each.peak) for each in compiled]),
        line("estimated peak / compiler's peak", [f"{ratio:.1%}" for ratio in ratios]),
        *(
            line(f"{name} kernels", [str(each.kernels.get(name, 0)) for each in compiled])
            for name in sorted({name for each in compiled for name in each.kernels})
        ),
    ]


def sweep_table(points: list[Point]) -> list[str]:
    """Returns the lines of the table of ``--sweep``."""
    lines = [
        "at best:",
        f"{'batch':>8}{'MTP':>6}{'tokens/s per user':>18}{'tokens/s per device':>20}  bound by",
    ]
    for point in points:
        lines.append(
            f"{point.batch:8,}{'yes' if point.mtp else 'no':>6}{point.tokens_per_s_per_user:18,.1f}"
            f"{point.tokens_per_s_per_device:20,.0f}  {point.binding}"
        )
    return lines
