"""Throughput against interactivity: what more rows a step give all users, and take from each."""

from __future__ import annotations

import dataclasses
import itertools

from dsv3_jax.plan import roofline
from dsv3_jax.plan.capacity import fits
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.fit import shapes_of

ACCEPTED = 0.85
"""Share of drafts that hold, at the least, as DeepSeek reports (V3 report, section 5.4.3)."""


@dataclasses.dataclass(frozen=True)
class Point:
    """Bounds on decoding with so many rows."""

    batch: int
    """Of all devices."""
    mtp: bool
    tokens_per_s_per_user: float
    """A row."""
    tokens_per_s_per_device: float
    binding: str


def sweep(deployment: Deployment, accepted: float = ACCEPTED) -> list[Point]:
    """Batches that double from the least that the layout takes to the most that fits, without and,
    where the model has an MTP layer, with drafts.

    Args:
      accepted: share of drafts that hold.
    """
    found = []
    for mtp in (False, True) if deployment.config.num_nextn_predict_layers else (False,):
        plan = dataclasses.replace(deployment, mtp=mtp)
        share = shapes_of(plan).on(plan.layout)
        for doublings in itertools.count():
            rows = share.layout.batch_multiple * 2**doublings
            plan = dataclasses.replace(plan, batch=rows)
            if not fits(share, plan):
                break
            bound = roofline.decode(share, plan)
            # A step yields a token a row, and each draft that holds.
            tokens = rows * (1 + accepted * plan.depth) / bound.seconds
            found.append(
                Point(rows, mtp, tokens / rows, tokens / plan.target.devices, bound.binding)
            )
    return found
