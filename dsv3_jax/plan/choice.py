"""Chooses the fastest deployment that fits, over all settings that the user left open."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Any

from dsv3_jax.plan import memory, roofline
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.estimate import DoesNotFitError
from dsv3_jax.plan.search_space import (
    SMALLEST_CHUNK,
    can_use_float8_activations,
    exchanges,
    layouts,
)
from dsv3_jax.plan.weights import ShardCache
from sharding import PRESETS, LayoutName

OPEN_SETTINGS = (
    *("layout_name", "exchange", "float8_dispatch", "activations", "redundant_experts"),
    "prefill_chunk",
)
"""Fields of a deployment that :func:`choose` can decide."""

_EQUALLY_FAST = 1.001  # two bounds whose ratio is at most this count as equal


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A deployment that runs on the target, with its memory use and lower bounds on its times."""

    deployment: Deployment
    peak: int
    """Memory use of one device in the larger of the two phases, in bytes."""
    step_seconds: float
    """Lower bound on the time of a decode step."""
    prefill_seconds: float
    """Lower bound on the time of the prefill of all prompts."""

    @property
    def seconds(self) -> float:
        """Lower bound on the time to serve the batch, if each context is half prompt, half
        answer."""
        d = self.deployment
        decode_steps_of_full_context = d.context / (1 + d.draft_depth)
        return (self.prefill_seconds + self.step_seconds * decode_steps_of_full_context) / 2

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.peak <= self.deployment.target.chip.memory


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen deployment, and what it was compared with."""

    deployment: Deployment
    reason: str
    """The choice and its reason, in one line."""
    layouts: tuple[Candidate, ...]
    """The best candidate of each layout that runs. The chosen one comes first."""


def choose(deployment: Deployment, open_settings: Collection[str], shards: ShardCache) -> Choice:
    """Returns the fastest deployment that fits.

    Fastest means the lowest bound on the time to serve the batch, if half of each context is prompt
    and half is answer. Among equally fast ones it prefers the values closest to the defaults.

    Args:
      deployment: the given settings. The values of open settings are ignored, except that
        ``prefill_chunk`` is an upper limit, lowered only where it does not fit.
      open_settings: names from :data:`OPEN_SETTINGS`. ``layout_name`` must be one of them.

    Raises:
      DoesNotFitError: nothing fits. The error describes the candidate with the lowest peak.
      ValueError: no layout runs on this target. The message gives the reason for each.
    """
    candidates: list[Candidate] = []
    refusals: dict[str, str] = {}
    for name in layouts(deployment.target):
        try:
            candidates.append(_best(_candidates(deployment, name, open_settings, shards)))
        except ValueError as refusal:
            refusals[name] = str(refusal)
    if not candidates:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        raise ValueError(f"layout: expected one that runs on {deployment.target.name}: {reasons}")
    best = _best(candidates)
    if not best.fits:
        raise DoesNotFitError.of(best.deployment, shards, len(candidates))
    rest = sorted(
        (each for each in candidates if each != best), key=lambda c: (not c.fits, c.seconds)
    )
    return Choice(best.deployment, _reason(best, rest, open_settings), (best, *rest))


def _candidates(
    deployment: Deployment,
    layout_name: LayoutName,
    open_settings: Collection[str],
    shards: ShardCache,
) -> list[Candidate]:
    """Returns every combination of the other open settings with one layout, preferred ones first.

    Raises:
      ValueError: no combination runs on the target with this layout.
    """
    deployment = dataclasses.replace(deployment, layout_name=layout_name)
    exchange_axes = deployment.layout.exchange_axes
    usable = exchanges(deployment.target)
    values_of: dict[str, tuple[Any, ...]] = {
        "redundant_experts": (PRESETS[layout_name].redundant_experts,),
        "exchange": usable if exchange_axes else usable[:1],
        "float8_dispatch": (False, True) if exchange_axes else (False,),
        "activations": (None, "float8") if can_use_float8_activations(deployment) else (None,),
    }
    values_of = {name: values for name, values in values_of.items() if name in open_settings}
    candidates, first_refusal = [], None
    for values in itertools.product(*values_of.values()):
        changed = dataclasses.replace(deployment, **dict(zip(values_of, values, strict=True)))
        try:
            candidates.append(_candidate(changed, "prefill_chunk" in open_settings, shards))
        except ValueError as refusal:
            first_refusal = first_refusal or refusal
    if first_refusal and not candidates:
        raise first_refusal
    return candidates


def _candidate(deployment: Deployment, chunk_is_open: bool, shards: ShardCache) -> Candidate:
    """Returns the candidate; an open prefill chunk is halved until it fits or is the smallest."""
    shard, available = shards.of(deployment), deployment.target.chip.memory
    use = memory.by_phase(shard, deployment)
    chunk = min(deployment.prefill_chunk, deployment.context)
    while chunk_is_open and use["prefill"].peak > available and chunk // 2 >= SMALLEST_CHUNK:
        chunk //= 2
        deployment = dataclasses.replace(deployment, prefill_chunk=chunk)
        use["prefill"] = memory.prefill(shard, deployment)
    return Candidate(
        deployment,
        max(each.peak for each in use.values()),
        roofline.decode(shard, deployment).seconds,
        roofline.prefill(shard, deployment).seconds,
    )


def _best(candidates: Sequence[Candidate]) -> Candidate:
    """Returns the first of the fastest candidates that fit; if none fits, the one with the lowest
    peak."""
    fitting = [each for each in candidates if each.fits]
    if not fitting:
        return min(candidates, key=lambda each: each.peak)
    least = min(each.seconds for each in fitting)
    return next(each for each in fitting if each.seconds <= _EQUALLY_FAST * least)


def _reason(best: Candidate, rest: Sequence[Candidate], open_settings: Collection[str]) -> str:
    deployment = best.deployment
    chosen = f"{deployment.layout_name}{_chosen_flags(deployment, open_settings)}"
    others = [each for each in rest if each.fits]
    if not rest:
        return f"{chosen}, the only layout that runs on {deployment.target.name}"
    if not others:
        return f"{chosen}, the only one of {1 + len(rest)} layouts that fits"
    second = others[0]
    return (
        f"{chosen}: the fastest of {1 + len(others)} layouts that fit, at least"
        f" {best.seconds:.3g} s to serve the batch if each context is half prompt and half answer;"
        f" next {second.deployment.layout_name}, {second.seconds:.3g} s"
    )


def _chosen_flags(deployment: Deployment, open_settings: Collection[str]) -> str:
    """Returns ``" with --flag value ..."`` for the chosen settings that are not the defaults."""
    flags = []
    for field in dataclasses.fields(deployment):
        value = getattr(deployment, field.name)
        is_chosen = field.name in open_settings and field.name != "layout_name"
        if is_chosen and value != field.default:
            flag = "--" + field.name.replace("_", "-")
            flags.append(flag if value is True else f"{flag} {value}")
    return f" with {' '.join(flags)}" if flags else ""
