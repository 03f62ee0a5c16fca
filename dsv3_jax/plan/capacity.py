"""Whether a deployment fits its devices, and how much would."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from dsv3_jax.plan import memory
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.weights import Share


def fits(share: Share, plan: Deployment) -> bool:
    peak = max(each.peak for each in memory.phases(share, plan).values())
    return peak <= plan.target.chip.memory


def largest_batch(share: Share, plan: Deployment, limit: int | None = None) -> int:
    """Returns the most sequences that fit at this context, up to ``limit``; 0 if none do."""
    multiple = share.layout.batch_multiple
    most = None if limit is None else limit // multiple
    return multiple * _largest(
        lambda k: fits(share, dataclasses.replace(plan, batch=k * multiple)), 1, most
    )


def largest_context(share: Share, plan: Deployment) -> int:
    """Returns the most tokens a sequence that fit at this batch, up to what the model reaches; 0 if
    none do."""
    return _largest(
        lambda tokens: fits(share, dataclasses.replace(plan, context=tokens)),
        1,
        plan.config.max_position_embeddings - 1,
    )


def largest_chunk(share: Share, plan: Deployment, least: int) -> int:
    """Returns the most prompt tokens at a time that fit, from ``least`` to the plan's; 0 if none
    do."""
    return _largest(
        lambda tokens: fits(share, dataclasses.replace(plan, prefill_chunk=tokens)),
        least,
        min(plan.prefill_chunk, plan.context),
    )


def _largest(enough: Callable[[int], bool], least: int, limit: int | None) -> int:
    """The largest number of ``least`` and above for which ``enough`` holds, by bisection: larger
    ones than the first that fails fail too."""
    if (limit is not None and limit < least) or not enough(least):
        return 0
    low, high = least, least * 2
    while (limit is None or high <= limit) and enough(high):
        low, high = high, high * 2
    if limit is not None:
        high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low
