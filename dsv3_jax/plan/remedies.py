"""Changes of settings that make a deployment fit: as few at a time as do."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Set
from typing import Any

from dsv3_jax.config import QUANTIZATIONS
from dsv3_jax.plan import capacity
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.settings import SMALLEST_CHUNK, exchanges, layouts, rounds_activations
from dsv3_jax.plan.shares import Shares

_ENOUGH = 3  # proposals, with which pairs of changes are not looked for

# What can be changed, in the order in which proposals stand.
_BATCH, _CHUNK, _TARGET = "batch", "prefill_chunk", "target"
_CHANGES = (
    *(_BATCH, _CHUNK, "exchange", "float8_dispatch", "layout_name"),
    *("quantization", "activations", _TARGET),
)


def remedies(deployment: Deployment, shares: Shares) -> Iterator[str]:
    """Yields flags that make it fit when they are added to its command, of each setting the value
    that gives up least: the larger batch or chunk, the wider weights, the fewer devices.

    Single changes come first; then pairs, if those are fewer than three; then three together, if
    there is nothing yet. No proposal contains another, unless it leaves twice the batch. More
    devices are combined with other changes only where nothing else fits.
    """
    found: list[set[str]] = []
    batch = 0  # the largest of a proposal that reduces it
    for together, enough in ((1, len(_CHANGES)), (2, _ENOUGH), (3, 1)):
        if len(found) >= enough:
            return
        for names in map(set, itertools.combinations(_CHANGES, together)):
            if any(each <= names and each != {_BATCH} for each in found):
                continue
            if together > 1 and _TARGET in names and found:
                continue
            if (better := _with(deployment, names, shares)) is None:
                continue
            if _BATCH in names:
                if better.batch < 2 * batch:
                    continue
                batch = better.batch
            found.append(names)
            yield _flags(deployment, better)


def _with(plan: Deployment, names: Set[str], shares: Shares) -> Deployment | None:
    """The plan with all of these settings changed, so that it fits; None if no values do."""
    chosen = [name for name in _CHANGES if name in names and name not in (_BATCH, _CHUNK)]
    for values in itertools.product(*(_alternatives(plan, name) for name in chosen)):
        merged: dict[str, Any] = {}
        for each in values:
            merged |= each
        try:
            changed = dataclasses.replace(plan, **merged)
            if (found := _smaller(changed, names, shares)) is not None:
                return found
        except ValueError:
            continue  # no such layout there, or a batch that does not divide over it
    return None


def _alternatives(plan: Deployment, name: str) -> Iterator[dict[str, Any]]:
    """Other values of one setting, the preferred first."""
    if name == "activations":
        if plan.activations is None and rounds_activations(plan):
            yield {name: "float8"}
    elif name == "exchange":
        yield from ({name: each} for each in exchanges(plan.target) if each != plan.exchange)
    elif name == "float8_dispatch":
        if not plan.float8_dispatch:
            yield {name: True}
    elif name == "layout_name":
        yield from ({name: each} for each in layouts(plan.target) if each != plan.layout_name)
    elif name == "quantization":
        known = list(QUANTIZATIONS)
        for each in known[known.index(plan.quantization) + 1 :]:
            smaller = {"quantization": each, "activations": None}
            yield smaller
            if rounds_activations(dataclasses.replace(plan, **smaller)):
                yield smaller | {"activations": "float8"}
    elif name == _TARGET:
        target = plan.target.doubled()
        while target is not None:
            yield {name: target}
            target = target.doubled()


def _smaller(plan: Deployment, names: Set[str], shares: Shares) -> Deployment | None:
    """The plan with the largest batch or chunk that fit, where these may change."""
    if _BATCH in names:
        # A batch that is reduced need not be a multiple of what was asked for.
        parts = plan.layout.batch_multiple
        plan = dataclasses.replace(plan, batch=max(parts, plan.batch // parts * parts))
        if _CHUNK in names:
            plan = dataclasses.replace(plan, prefill_chunk=min(plan.prefill_chunk, SMALLEST_CHUNK))
        rows = capacity.largest_batch(shares.of(plan), plan, plan.batch)
        return dataclasses.replace(plan, batch=rows) if rows else None
    share = shares.of(plan)
    if _CHUNK in names:
        chunk = capacity.largest_chunk(share, plan, SMALLEST_CHUNK)
        return dataclasses.replace(plan, prefill_chunk=chunk) if chunk else None
    return plan if capacity.fits(share, plan) else None


def _flags(before: Deployment, after: Deployment) -> str:
    """What to add to a command that asks for ``before``."""
    said = []
    for name in _CHANGES:
        if (value := getattr(after, name)) == getattr(before, name):
            continue
        flag = "--" + name.removesuffix("_name").replace("_", "-")
        if value is None:
            said.append(f"without {flag}")
        elif value is True:
            said.append(flag)
        else:
            said.append(f"{flag} {value.name if name == _TARGET else value}")
    return " ".join(said)
