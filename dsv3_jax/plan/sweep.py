"""Throughput and speed per user over batch sizes.

A larger batch raises the throughput of the devices and lowers the speed that each user sees.
"""

from __future__ import annotations

import dataclasses
import itertools

from dsv3_jax.plan import roofline
from dsv3_jax.plan.capacity import fits
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.weights import ShardCache

ACCEPTED = 0.85
"""Acceptance rate of MTP drafts: the lower end of what DeepSeek reports (V3 report, section
5.4.3)."""


@dataclasses.dataclass(frozen=True)
class Point:
    """Upper bounds on the speed of decode at one batch size."""

    batch: int
    """Number of sequences on all devices together."""
    mtp: bool
    """Whether the MTP layer drafts one token per step."""
    tokens_per_s_per_user: float
    """Tokens/s of one sequence."""
    tokens_per_s_per_device: float
    """Tokens/s of all sequences, divided by the number of devices."""
    binding: str
    """The resource that limits the step: see :attr:`dsv3_jax.plan.roofline.Roofline.binding`."""


def sweep(deployment: Deployment, accepted: float = ACCEPTED) -> list[Point]:
    """Returns a point for every batch size that fits, doubling from the layout's smallest.

    If the model has an MTP layer, the points without drafts come first, then those with drafts.

    Args:
      accepted: acceptance rate of drafts, from 0 to 1.
    """
    points, shards = [], ShardCache()
    for mtp in (False, True) if deployment.config.num_nextn_predict_layers else (False,):
        candidate = dataclasses.replace(deployment, mtp=mtp)
        smallest = candidate.layout.batch_multiple
        for doublings in itertools.count():
            batch = smallest * 2**doublings
            candidate = dataclasses.replace(candidate, batch=batch)
            shard = shards.of(candidate)
            if not fits(shard, candidate):
                break
            bound = roofline.decode(shard, candidate)
            # A step yields one token per sequence, and one more for each accepted draft.
            tokens_per_s = batch * (1 + accepted * candidate.draft_depth) / bound.seconds
            points.append(
                Point(
                    batch,
                    mtp,
                    tokens_per_s / batch,
                    tokens_per_s / candidate.target.devices,
                    bound.binding,
                )
            )
    return points
