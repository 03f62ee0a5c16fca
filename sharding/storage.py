"""Parameters in parts that nobody computes with: gathered where they are used (FSDP, ZeRO-3)."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped


def stored(
    name: str, shape: tuple[int, ...], used: NamedSharding, over: tuple[str, ...]
) -> NamedSharding:
    """How a parameter is stored that lies as ``used`` where a layer computes with it.

    The devices along ``over`` that would hold copies hold a part each, of the first dimension that
    divides. A vector stays as it is: it is small.

    Args:
      name: of the parameter, for messages.
      over: axes of the mesh.

    Raises:
      ValueError: no dimension divides.
    """
    mesh, spec = used.mesh, _by_dimension(used.spec, len(shape))
    taken = [axis for axes in spec for axis in axes]
    copies = tuple(axis for axis in over if axis not in taken and mesh.shape[axis] > 1)
    if len(shape) < 2 or not copies:
        return used
    devices = math.prod(mesh.shape[axis] for axis in copies)
    for place, (size, axes) in enumerate(zip(shape, spec, strict=True)):
        if size % (devices * math.prod(mesh.shape[axis] for axis in axes)) == 0:
            split = [(*a, *copies) if i == place else a for i, a in enumerate(spec)]
            return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in split)))
    raise ValueError(
        f"{name}: expected a dimension that divides over {devices} devices of mesh axis"
        f" {' x '.join(copies)}, to be stored in parts, got {shape}"
    )


def gathered(
    part: Shaped[Array, "*part"], used: PartitionSpec, stored: PartitionSpec
) -> Shaped[Array, "*whole"]:
    """Inside shard_map: of a device's stored part, what it computes with; at most one all-gather.

    The gradient goes back by one reduce-scatter, which adds in float32.
    """
    specs = (_by_dimension(spec, part.ndim) for spec in (used, stored))
    for dimension, (axes, of_parts) in enumerate(zip(*specs, strict=True)):
        if extra := of_parts[len(axes) :]:
            return _gather(dimension, extra, part)
    return part


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(
    dimension: int, axes: tuple[str, ...], part: Shaped[Array, "*part"]
) -> Shaped[Array, "*whole"]:
    return lax.all_gather(part, axes, axis=dimension, tiled=True)


def _forward(dimension: int, axes: tuple[str, ...], part: jax.Array) -> tuple[jax.Array, None]:
    return lax.all_gather(part, axes, axis=dimension, tiled=True), None


def _backward(
    dimension: int, axes: tuple[str, ...], residuals: None, whole: jax.Array
) -> tuple[jax.Array]:
    total = lax.psum_scatter(
        whole.astype(jnp.float32), axes, scatter_dimension=dimension, tiled=True
    )
    return (total.astype(whole.dtype),)


_gather.defvjp(_forward, _backward)


def keeps(primitive: Primitive, *arrays: Any, **parameters: Any) -> bool:
    """A policy for :func:`jax.checkpoint`: all is kept for the backward pass but what was gathered
    here, which is gathered again; else every device would come to hold all parameters."""
    # Tokens that are gathered travel as integers: see sharding.parcel.
    return primitive.name != "all_gather" or not jnp.issubdtype(arrays[0].dtype, jnp.floating)


def _by_dimension(spec: PartitionSpec, dimensions: int) -> list[tuple[str, ...]]:
    """The axes that split each dimension, the first of them into the largest parts."""
    axes = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec]
    return axes + [()] * (dimensions - len(axes))
