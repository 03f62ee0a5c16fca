"""The fastest deployment that fits, of those that differ in settings which the user left open."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Any

from dsv3_jax.plan import memory, roofline
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.fit import DoesNotFitError
from dsv3_jax.plan.settings import SMALLEST_CHUNK, exchanges, layouts, rounds_activations
from dsv3_jax.plan.shares import Shares
from sharding import PRESETS, LayoutName

OPEN = (
    *("layout_name", "exchange", "float8_dispatch", "activations", "redundant_experts"),
    "prefill_chunk",
)
"""Fields of a deployment that :func:`choose` can decide."""

_AS_FAST = 1.001  # apart by no more, two bounds are the same


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings that run on the target, and what they take."""

    deployment: Deployment
    peak: int
    """Bytes of one device."""
    step: float
    """Seconds of a decode step, at the least."""
    prefill: float
    """Seconds of a prefill of all prompts, at the least."""

    @property
    def seconds(self) -> float:
        """Least time to serve the batch, if half of each context is prompt and half is answer."""
        plan = self.deployment
        return (self.prefill + self.step * plan.context / (1 + plan.depth)) / 2

    @property
    def fits(self) -> bool:
        return self.peak <= self.deployment.target.chip.memory


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen settings, and the best of every layout that runs, the chosen one first."""

    deployment: Deployment
    because: str
    """One line: what was chosen, and why."""
    layouts: tuple[Candidate, ...]


def choose(deployment: Deployment, open: Collection[str], shares: Shares) -> Choice:
    """Returns the fastest settings that fit: those with the least time for a batch of requests
    whose context is half prompt and half answer. Of equally fast ones it takes those nearest to
    the defaults. The times are lower bounds.

    Args:
      deployment: a value for every setting, whose layout runs on the target. Those of ``open`` are
        ignored but for ``prefill_chunk``, which becomes less only where it does not fit.
      open: fields to choose, of :data:`OPEN`, ``layout_name`` among them.

    Raises:
      DoesNotFitError: nothing does. It has the combination with the lowest peak.
      ValueError: no layout runs on this target; the message has the reason for each.
    """
    found: list[Candidate] = []
    refusals: dict[str, str] = {}
    for name in layouts(deployment.target):
        try:
            found.append(_best(_candidates(deployment, name, open, shares)))
        except ValueError as refusal:
            refusals[name] = str(refusal)
    if not found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        raise ValueError(f"layout: expected one that runs on {deployment.target.name}: {reasons}")
    best = _best(found)
    if not best.fits:
        raise DoesNotFitError.of(best.deployment, shares)
    rest = sorted((each for each in found if each != best), key=lambda c: (not c.fits, c.seconds))
    return Choice(best.deployment, _because(best, rest, open), (best, *rest))


def _candidates(
    deployment: Deployment, layout_name: LayoutName, open: Collection[str], shares: Shares
) -> list[Candidate]:
    """Every combination of the other open settings on one layout, the preferred first.

    Raises:
      ValueError: the layout does not run on the target, whatever they are.
    """
    plan = dataclasses.replace(deployment, layout_name=layout_name)
    exchanged = plan.layout.exchange_axes
    settings: dict[str, tuple[Any, ...]] = {
        "redundant_experts": (PRESETS[layout_name].redundant_experts,),
        "exchange": exchanges(plan.target) if exchanged else exchanges(plan.target)[:1],
        "float8_dispatch": (False, True) if exchanged else (False,),
        "activations": (None, "float8") if rounds_activations(plan) else (None,),
    }
    settings = {name: values for name, values in settings.items() if name in open}
    found, refused = [], None
    for values in itertools.product(*settings.values()):
        each = dataclasses.replace(plan, **dict(zip(settings, values, strict=True)))
        try:
            found.append(_candidate(each, "prefill_chunk" in open, shares))
        except ValueError as refusal:
            refused = refused or refusal
    if refused and not found:
        raise refused
    return found


def _candidate(plan: Deployment, open_chunk: bool, shares: Shares) -> Candidate:
    """The deployment with its prefill chunk, or with the largest half, quarter ... that fits."""
    share, available = shares.of(plan), plan.target.chip.memory
    needed = memory.phases(share, plan)
    chunk = min(plan.prefill_chunk, plan.context)
    while open_chunk and needed["prefill"].peak > available and chunk // 2 >= SMALLEST_CHUNK:
        chunk //= 2
        plan = dataclasses.replace(plan, prefill_chunk=chunk)
        needed["prefill"] = memory.prefilling(share, plan)
    return Candidate(
        plan,
        max(each.peak for each in needed.values()),
        roofline.decode(share, plan).seconds,
        roofline.prefill(share, plan).seconds,
    )


def _best(found: Sequence[Candidate]) -> Candidate:
    """As :func:`choose` documents; where none fits, the one with the lowest peak."""
    fitting = [each for each in found if each.fits]
    if not fitting:
        return min(found, key=lambda each: each.peak)
    least = min(each.seconds for each in fitting)
    return next(each for each in fitting if each.seconds <= _AS_FAST * least)


def _because(best: Candidate, rest: Sequence[Candidate], open: Collection[str]) -> str:
    plan = best.deployment
    said = f"{plan.layout_name}{_beside(plan, open)}"
    others = [each for each in rest if each.fits]
    if not rest:
        return f"{said}, the only layout that runs on {plan.target.name}"
    if not others:
        return f"{said}, the only one that fits of {1 + len(rest)} layouts"
    second = others[0]
    return (
        f"{said}: the fastest of {1 + len(others)} layouts that fit, at the least"
        f" {best.seconds:.3g} s for requests that are half prompt, half answer; next"
        f" {second.deployment.layout_name}, {second.seconds:.3g} s"
    )


def _beside(plan: Deployment, open: Collection[str]) -> str:
    """Flags of the other settings that were chosen and are not the defaults."""
    said = []
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if field.name in open and field.name != "layout_name" and value != field.default:
            flag = "--" + field.name.replace("_", "-")
            said.append(flag if value is True else f"{flag} {value}")
    return f" with {' '.join(said)}" if said else ""
