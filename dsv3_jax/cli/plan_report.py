"""What ``dsv3 plan`` prints: tables, and the same as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from dsv3_jax.plan.choice import OPEN, Candidate, Choice
from dsv3_jax.plan.compiled import Compiled, Phase
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.fit import DoesNotFitError, Plan
from dsv3_jax.plan.memory import MEANINGS, Memory
from dsv3_jax.plan.roofline import Roofline
from dsv3_jax.plan.sweep import Point
from dsv3_jax.words import counted


def as_json(
    found: Plan,
    model: str,
    choice: Choice | None,
    programs: dict[Phase, Compiled],
    points: list[Point],
) -> dict[str, Any]:
    """Bytes and seconds, and tokens a second."""
    return {
        **_needs(found.deployment, found.memory, model),
        "fits": True,
        "chosen": None
        if choice is None
        else {
            "because": choice.because,
            "layouts": [_candidate(each) for each in choice.layouts],
        },
        "largest_batch": found.largest_batch,
        "largest_context": found.largest_context,
        "bounds": {phase: _bound(each) for phase, each in found.rooflines.items()},
        "compiled": {
            phase: dataclasses.asdict(each) | {"peak": each.peak}
            for phase, each in programs.items()
        },
        "sweep": [dataclasses.asdict(point) for point in points],
    }


def refusal_json(error: DoesNotFitError, model: str) -> dict[str, Any]:
    """The same keys up to ``fits``, and what is missing."""
    part, nbytes = error.largest_part
    return {
        **_needs(error.deployment, error.memory, model),
        "fits": False,
        "missing_bytes": error.missing,
        "largest_part": {"name": part, "bytes": nbytes},
        "what_fits": list(error.remedies),
    }


def _needs(plan: Deployment, memory: dict[str, Memory], model: str) -> dict[str, Any]:
    return {
        "model": model,
        "target": plan.target.name,
        "devices": plan.target.devices,
        "kernels": plan.target.chip.kernels,
        "layout": plan.layout_name,
        **{
            name: getattr(plan, name)
            for name in (
                *("batch", "context", "quantization", "activations", "exchange"),
                *("float8_dispatch", "mtp", "redundant_experts", "prefill_chunk"),
            )
        },
        "memory_bytes": plan.target.chip.memory,
        "peak_bytes": max(each.peak for each in memory.values()),
        "bytes": {
            phase: {**dataclasses.asdict(each), "peak": each.peak} for phase, each in memory.items()
        },
    }


def _candidate(each: Candidate) -> dict[str, Any]:
    plan = each.deployment
    settings = {name: getattr(plan, name) for name in OPEN if name != "layout_name"}
    return {
        "layout": plan.layout_name,
        **settings,
        "fits": each.fits,
        "peak_bytes": each.peak,
        "step_seconds": each.step,
        "prefill_seconds": each.prefill,
        "seconds": each.seconds,
    }


def _bound(roofline: Roofline) -> dict[str, Any]:
    names = ("seconds", "binding", "tokens_per_s", "tokens_per_s_per_device")
    return dataclasses.asdict(roofline) | {name: getattr(roofline, name) for name in names}


def table(found: Plan, model: str, choice: Choice | None) -> list[str]:
    plan = found.deployment
    lines = [f"{title(plan, model)}: {_rows(plan)}"]
    if choice is not None:
        lines.append(f"layout: {choice.because}")
    lines += [
        *_note(plan),
        "",
        *_memory(plan, found.memory),
        "",
        f"largest batch at this context         {found.largest_batch:>22,}",
        f"largest context at this batch         {found.largest_context:>22,}",
        "",
        f"{'ms at the least':36}{'a step':>12}{'a prefill':>12}",
    ]
    step, prompts = found.rooflines["decode"], found.rooflines["prefill"]
    for name, words in (
        ("weights", "reading weights"),
        ("cache", "reading the cache"),
        ("arithmetic", "arithmetic"),
        ("network", "network"),
        ("seconds", "the longest; memory's two added"),
    ):
        a, b = getattr(step, name), getattr(prompts, name)
        lines.append(f"  {words:34}{1e3 * a:12.2f}{1e3 * b:12.2f}")
    lines += [
        f"  {'bound by':34}{step.binding:>12}{prompts.binding:>12}",
        f"  {'tokens/s at most, all devices':34}"
        f"{step.tokens_per_s:12,.0f}{prompts.tokens_per_s:12,.0f}",
        f"  {'tokens/s at most, a device':34}"
        f"{step.tokens_per_s_per_device:12,.0f}{prompts.tokens_per_s_per_device:12,.0f}",
    ]
    return lines


def refusal(error: DoesNotFitError, model: str) -> list[str]:
    """The memory of what comes closest to fitting, what is missing and what would help."""
    plan = error.deployment
    part, nbytes = error.largest_part
    return [
        f"{title(plan, model)}: {_rows(plan)} {'does' if plan.batch == 1 else 'do'} not fit",
        *_note(plan),
        "",
        *_memory(plan, error.memory),
        "",
        f"too much: {error.missing / 1e9:.2f} GB a device; the largest part is {part},"
        f" {nbytes / 1e9:.2f} GB",
        "what fits, added to the command:" if error.remedies else "nothing near fits",
        *(f"  {each}" for each in error.remedies),
    ]


def _memory(plan: Deployment, memory: dict[str, Memory]) -> list[str]:
    lines = [f"{'GB a device':36}" + "".join(f"{phase:>12}" for phase in memory)]

    def line(words: str, values: list[int]) -> str:
        return f"  {words:34}" + "".join(f"{value / 1e9:12.2f}" for value in values)

    for name, words in MEANINGS.items():
        values = [getattr(each, name) for each in memory.values()]
        if any(values):
            lines.append(line(words, values))
    return [
        *lines,
        line("peak", [each.peak for each in memory.values()]),
        line("of", [plan.target.chip.memory] * len(memory)),
    ]


def _note(plan: Deployment) -> list[str]:
    """What limits the figures for chips that this project has no kernels for."""
    if plan.target.chip.kernels:
        return []
    return [
        f"note: this project has no kernels for {plan.target.kind}; XLA alone runs there. Its"
        " workspace is an estimate, and no program comes near these bounds"
    ]


def title(plan: Deployment, model: str) -> str:
    devices = counted(plan.target.devices, "device")
    return f"{model} in {plan.quantization} on {plan.target.name}, {devices}, {plan.layout_name}"


def _rows(plan: Deployment) -> str:
    return f"{counted(plan.batch, 'row')} of {counted(plan.context, 'token')}"


def compiled_table(found: Plan, programs: dict[Phase, Compiled]) -> list[str]:
    compiled = list(programs.values())

    def line(words: str, cells: list[str]) -> str:
        return f"  {words:34}" + "".join(f"{cell:>12}" for cell in cells)

    def gb(nbytes: int) -> str:
        return f"{nbytes / 1e9:.2f}"

    ratios = [found.memory[phase].peak / each.peak for phase, each in programs.items()]
    return [
        f"{'GB a device, says the compiler':36}" + "".join(f"{phase:>12}" for phase in programs),
        line("weights, cache, counters", [gb(each.arguments) for each in compiled]),
        line("everything else", [gb(each.workspace) for each in compiled]),
        line("peak", [gb(each.peak) for each in compiled]),
        line("the formula's peak beside it", [f"{ratio:.1%}" for ratio in ratios]),
        *(
            line(f"{name} kernels", [str(each.kernels.get(name, 0)) for each in compiled])
            for name in sorted({name for each in compiled for name in each.kernels})
        ),
    ]


def sweep_table(points: list[Point]) -> list[str]:
    lines = [f"{'rows':>8}{'MTP':>6}{'tokens/s a user':>18}{'tokens/s a device':>20}  bound by"]
    for point in points:
        lines.append(
            f"{point.batch:8,}{'yes' if point.mtp else 'no':>6}{point.tokens_per_s_per_user:18,.1f}"
            f"{point.tokens_per_s_per_device:20,.0f}  {point.binding}"
        )
    return lines
