"""What fits a device, how much of it would, and what would where this does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import get_args

from dsv3_jax.config import QUANTIZATIONS
from dsv3_jax.plan import memory, roofline
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.memory import Memory
from dsv3_jax.plan.roofline import Roofline
from dsv3_jax.plan.weights import Shapes, Share
from sharding import PRESETS, Exchange


@dataclasses.dataclass(frozen=True)
class Plan:
    """Of a deployment that fits."""

    deployment: Deployment
    memory: dict[str, Memory]
    """While decoding, and in prefill."""
    largest_batch: int
    """At this context."""
    largest_context: int
    """At this batch, up to what the model reaches."""
    rooflines: dict[str, Roofline]

    @property
    def peak(self) -> int:
        return max(each.peak for each in self.memory.values())


def plan(deployment: Deployment) -> Plan:
    """What the deployment takes, and could.

    Raises:
      ValueError: parameters that cannot be cut as the layout says, rows that do not divide over the
        devices, or what does not fit: then with the nearest that does.
    """
    shapes = shapes_of(deployment)
    share = shapes.on(deployment.layout)
    share.layout.check_batch(deployment.batch)
    if (peak := _peak(share, deployment)) > deployment.target.chip.memory:
        nearest = "; ".join(_nearest(shapes, deployment)) or "nothing near does"
        raise ValueError(
            f"expected at most {_gb(deployment.target.chip.memory)} a device of"
            f" {deployment.target.name}, got {_gb(peak)}; what fits: {nearest}"
        )
    multiple = share.layout.row_multiple
    rows = _largest(
        lambda k: fits(share, dataclasses.replace(deployment, batch=k * multiple)),
        deployment.batch // multiple,
        None,
    )
    context = _largest(
        lambda tokens: fits(share, dataclasses.replace(deployment, context=tokens)),
        deployment.context,
        shapes.config.max_position_embeddings - 1,
    )
    return Plan(
        deployment,
        {
            "decode": memory.decoding(share, deployment),
            "prefill": memory.prefilling(share, deployment),
        },
        rows * multiple,
        context,
        {
            "decode": roofline.decode(share, deployment),
            "prefill": roofline.prefill(share, deployment),
        },
    )


def shapes_of(deployment: Deployment) -> Shapes:
    return Shapes.of(
        deployment.config,
        deployment.quantization,
        mtp=deployment.mtp,
        redundant_experts=deployment.redundant_experts,
    )


def _peak(share: Share, deployment: Deployment) -> int:
    found = memory.decoding(share, deployment), memory.prefilling(share, deployment)
    return max(each.peak for each in found)


def fits(share: Share, deployment: Deployment) -> bool:
    return _peak(share, deployment) <= deployment.target.chip.memory


def _largest(enough: Callable[[int], bool], fitting: int, limit: int | None) -> int:
    """The largest number that fits, from one that does; what takes more does not get less."""
    low, high = fitting, fitting * 2
    while (limit is None or high <= limit) and enough(high):
        low, high = high, high * 2
    if limit is not None:
        high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low


def _nearest(shapes: Shapes, deployment: Deployment) -> Iterator[str]:
    """One change each that would do: of batch, prefill, exchange, layout, weights, or devices."""
    share = shapes.on(deployment.layout)
    multiple = share.layout.row_multiple

    def with_rows(k: int) -> bool:
        return fits(share, dataclasses.replace(deployment, batch=k * multiple))

    if deployment.batch > multiple and with_rows(1):
        yield f"--batch {_largest(with_rows, 1, deployment.batch // multiple) * multiple}"

    def with_chunk(tokens: int) -> bool:
        return fits(share, dataclasses.replace(deployment, prefill_chunk=tokens))

    if with_chunk(1):
        yield f"--prefill-chunk {_largest(with_chunk, 1, deployment.prefill_chunk)}"
    for exchange in get_args(Exchange):
        if _would(shapes, dataclasses.replace(deployment, exchange=exchange)):
            yield f"--exchange {exchange}"
            break
    for name in PRESETS:
        if _would(shapes, dataclasses.replace(deployment, layout_name=name)):
            yield f"--layout {name}"
            break
    for name in list(QUANTIZATIONS)[list(QUANTIZATIONS).index(deployment.quantization) + 1 :]:
        smaller = dataclasses.replace(deployment, quantization=name, activations=None)
        if _would(shapes_of(smaller), smaller):
            yield f"--quantization {name}"
            break
    target = deployment.target.doubled()
    while target is not None:
        if _would(shapes, dataclasses.replace(deployment, target=target)):
            yield f"--target {target.name}"
            break
        target = target.doubled()


def _would(shapes: Shapes, deployment: Deployment) -> bool:
    try:
        share = shapes.on(deployment.layout)
        share.layout.check_batch(deployment.batch)
    except ValueError:
        return False
    return fits(share, deployment)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
