"""Whether a deployment fits its devices, and the largest batch, context and chunk that do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from dsv3_jax.plan import memory
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.weights import ModelShard


def fits(shard: ModelShard, deployment: Deployment) -> bool:
    """Returns whether the peaks of decode and prefill are within the device's memory."""
    peak = max(use.peak for use in memory.by_phase(shard, deployment).values())
    return peak <= deployment.target.chip.memory


def largest_batch(shard: ModelShard, deployment: Deployment, limit: int | None = None) -> int:
    """Returns the largest batch size that fits at this context, at most ``limit``; 0 if none fits.

    The batch size counts the sequences on all devices. It is a multiple of the number of devices
    that the layout divides a batch over.
    """
    multiple = shard.layout.batch_multiple
    most = None if limit is None else limit // multiple
    return multiple * _largest(
        lambda k: fits(shard, dataclasses.replace(deployment, batch=k * multiple)), 1, most
    )


def largest_context(shard: ModelShard, deployment: Deployment) -> int:
    """Returns the most tokens per sequence that fit at this batch size; 0 if not even one does.

    The model's ``max_position_embeddings`` limits it too.
    """
    return _largest(
        lambda tokens: fits(shard, dataclasses.replace(deployment, context=tokens)),
        1,
        deployment.most_context,
    )


def largest_chunk(shard: ModelShard, deployment: Deployment, least: int) -> int:
    """Returns the largest prefill chunk that fits, in tokens per sequence; 0 if none fits.

    It is at least ``least`` and at most the deployment's own chunk.
    """
    return _largest(
        lambda tokens: fits(shard, dataclasses.replace(deployment, prefill_chunk=tokens)),
        least,
        min(deployment.prefill_chunk, deployment.context),
    )


def _largest(is_enough: Callable[[int], bool], least: int, limit: int | None) -> int:
    """Returns the largest integer in [least, limit] for which ``is_enough`` is true, or 0.

    It doubles, then bisects, and assumes that every integer after the first false one is false.
    """
    if (limit is not None and limit < least) or not is_enough(least):
        return 0
    low, high = least, least * 2
    while (limit is None or high <= limit) and is_enough(high):
        low, high = high, high * 2
    if limit is not None:
        high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_enough(middle) else (low, middle)
    return low
