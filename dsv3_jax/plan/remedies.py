"""Changes of settings that make a deployment fit, as few at a time as possible."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Set
from typing import Any

from dsv3_jax.plan import capacity, engine_state, memory
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.search_space import (
    SMALLEST_CHUNK,
    can_use_float8_activations,
    exchanges,
    layouts,
)
from dsv3_jax.plan.weights import ShardCache
from dsv3_jax.quantization import QUANTIZATIONS

_ENOUGH = 3  # with this many proposals of single changes, pairs of changes are not tried

# Settings that can change, in the order in which they appear in a proposal.
_BATCH, _CHUNK, _TARGET = "batch", "prefill_chunk", "target"
_CHANGES = (
    *(_BATCH, _CHUNK, "exchange", "float8_dispatch", "layout_name"),
    *("quantization", "activations", _TARGET),
)


def remedies(deployment: Deployment, shards: ShardCache) -> Iterator[str]:
    """Yields strings of flags. Adding any one of them to the command makes the deployment fit.

    Each changed setting has the value that gives up least: the largest batch or chunk, the widest
    weights, the fewest devices.

    Single changes come first. Pairs follow if there are fewer than three single ones, and
    combinations of three if there is nothing yet. No proposal contains another one, unless it
    allows twice the batch. More devices are combined with other changes only where nothing else
    fits.
    """
    if (tokens := _smaller_cache(deployment, shards)) is not None:
        yield f"--cache-tokens {tokens}"
    proposed: list[set[str]] = []
    batch = 0  # the largest batch of a proposal that reduces it
    for size, enough in ((1, len(_CHANGES)), (2, _ENOUGH), (3, 1)):
        if len(proposed) >= enough:
            return
        for names in map(set, itertools.combinations(_CHANGES, size)):
            if any(each <= names and each != {_BATCH} for each in proposed):
                continue
            if size > 1 and _TARGET in names and proposed:
                continue
            if (fitting := _changed(deployment, names, shards)) is None:
                continue
            if _BATCH in names:
                if fitting.batch < 2 * batch:
                    continue
                batch = fitting.batch
            proposed.append(names)
            yield _flags(deployment, fitting)


def _smaller_cache(deployment: Deployment, shards: ShardCache) -> int | None:
    """Returns the largest size of an Engine's cache that fits, if that holds a whole request."""
    if deployment.engine is None:
        return None
    shard = shards.of(deployment)
    peak = max(use.peak for use in memory.by_phase(shard, deployment).values())
    spare = deployment.target.chip.memory - peak
    tokens = engine_state.largest_cache_tokens(shard, deployment, spare)
    per_shard = tokens // shard.layout.num_shards("batch")
    return tokens if per_shard >= deployment.context + deployment.draft_depth else None


def _changed(deployment: Deployment, names: Set[str], shards: ShardCache) -> Deployment | None:
    """Returns the deployment with all of the named settings changed so that it fits.

    None if no values of these settings make it fit.
    """
    chosen = [name for name in _CHANGES if name in names and name not in (_BATCH, _CHUNK)]
    for alternatives in itertools.product(*(_alternatives(deployment, name) for name in chosen)):
        merged: dict[str, Any] = {}
        for alternative in alternatives:
            merged |= alternative
        try:
            candidate = dataclasses.replace(deployment, **merged)
            if (fitting := _reduced(candidate, names, shards)) is not None:
                return fitting
        except ValueError:
            continue  # the layout does not exist there, or the batch does not divide over it
    return None


def _alternatives(deployment: Deployment, name: str) -> Iterator[dict[str, Any]]:
    """Yields the other values of one setting, preferred ones first."""
    if name == "activations":
        if deployment.activations is None and can_use_float8_activations(deployment):
            yield {name: "float8"}
    elif name == "exchange":
        usable = exchanges(deployment.target)
        yield from ({name: each} for each in usable if each != deployment.exchange)
    elif name == "float8_dispatch":
        if not deployment.float8_dispatch:
            yield {name: True}
    elif name == "layout_name":
        usable = layouts(deployment.target)
        yield from ({name: each} for each in usable if each != deployment.layout_name)
    elif name == "quantization":
        known = list(QUANTIZATIONS)
        for each in known[known.index(deployment.quantization) + 1 :]:
            smaller = {"quantization": each, "activations": None}
            yield smaller
            if can_use_float8_activations(dataclasses.replace(deployment, **smaller)):
                yield smaller | {"activations": "float8"}
    elif name == _TARGET:
        target = deployment.target.doubled()
        while target is not None:
            yield {name: target}
            target = target.doubled()


def _reduced(deployment: Deployment, names: Set[str], shards: ShardCache) -> Deployment | None:
    """Returns the deployment with the largest batch or chunk that fits, if these may change.

    None if it does not fit.
    """
    if _BATCH in names:
        # The reduced batch need not be a multiple of the one that was asked for.
        multiple = deployment.layout.batch_multiple
        batch = max(multiple, deployment.batch // multiple * multiple)
        deployment = dataclasses.replace(deployment, batch=batch)
        if _CHUNK in names:
            chunk = min(deployment.prefill_chunk, SMALLEST_CHUNK)
            deployment = dataclasses.replace(deployment, prefill_chunk=chunk)
        batch = capacity.largest_batch(shards.of(deployment), deployment, deployment.batch)
        return dataclasses.replace(deployment, batch=batch) if batch else None
    shard = shards.of(deployment)
    if _CHUNK in names:
        chunk = capacity.largest_chunk(shard, deployment, SMALLEST_CHUNK)
        return dataclasses.replace(deployment, prefill_chunk=chunk) if chunk else None
    return deployment if capacity.fits(shard, deployment) else None


def _flags(before: Deployment, after: Deployment) -> str:
    """Returns the flags to add to a command for ``before``, so that it asks for ``after``."""
    flags = []
    for name in _CHANGES:
        if (value := getattr(after, name)) == getattr(before, name):
            continue
        flag = "--" + name.removesuffix("_name").replace("_", "-")
        if value is None:
            flags.append(f"without {flag}")
        elif value is True:
            flags.append(flag)
        else:
            flags.append(f"{flag} {value.name if name == _TARGET else value}")
    return " ".join(flags)
