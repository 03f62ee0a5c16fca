"""Parameters that are stored sharded and gathered where they are used (FSDP, ZeRO-3)."""

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


def fsdp_sharding(
    name: str, shape: tuple[int, ...], compute: NamedSharding, fsdp_axes: tuple[str, ...]
) -> NamedSharding:
    """Returns the sharding in which a parameter is stored.

    ``compute`` is the sharding that a layer computes with. Devices along ``fsdp_axes`` that would
    store equal copies under it store one shard each of the first dimension that divides. Vectors
    keep ``compute``: they are small.

    Args:
      name: name of the parameter, for error messages.
      fsdp_axes: mesh axes.

    Raises:
      ValueError: no dimension divides.
    """
    mesh, spec = compute.mesh, _by_dimension(compute.spec, len(shape))
    used = [axis for axes in spec for axis in axes]
    replicated = tuple(a for a in fsdp_axes if a not in used and mesh.shape[a] > 1)
    if len(shape) < 2 or not replicated:
        return compute
    devices = math.prod(mesh.shape[axis] for axis in replicated)
    for dimension, (size, axes) in enumerate(zip(shape, spec, strict=True)):
        if size % (devices * math.prod(mesh.shape[axis] for axis in axes)) == 0:
            spec[dimension] = (*axes, *replicated)
            return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))
    raise ValueError(
        f"{name}: expected a dimension that divides over {devices} devices of mesh axis"
        f" {' x '.join(replicated)}, to be stored sharded, got {shape}"
    )


def gather_parameter(
    shard: Shaped[Array, "*shard"], compute: PartitionSpec, storage: PartitionSpec
) -> Shaped[Array, "*whole"]:
    """Gathers a stored shard to what the device computes with; at most one all-gather.

    Runs inside shard_map. The gradient is one reduce-scatter, which sums in float32.

    Args:
      shard: this device's shard under ``storage``.
      compute: spec of the sharding that :func:`fsdp_sharding` takes.
      storage: spec of the sharding that it returns.
    """
    specs = (_by_dimension(spec, shard.ndim) for spec in (compute, storage))
    for dimension, (compute_axes, storage_axes) in enumerate(zip(*specs, strict=True)):
        if extra := storage_axes[len(compute_axes) :]:
            return gather(dimension, extra, shard)
    return shard


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather(
    dimension: int, axes: tuple[str, ...], shard: Shaped[Array, "*shard"]
) -> Shaped[Array, "*whole"]:
    """Joins the shards along ``dimension`` of all devices along ``axes``, inside shard_map.
    The gradient is one reduce-scatter, which sums in float32."""
    return lax.all_gather(shard, axes, axis=dimension, tiled=True)


def _gather_forward(
    dimension: int, axes: tuple[str, ...], shard: jax.Array
) -> tuple[jax.Array, None]:
    return lax.all_gather(shard, axes, axis=dimension, tiled=True), None


def _gather_backward(
    dimension: int, axes: tuple[str, ...], residuals: None, cotangent: jax.Array
) -> tuple[jax.Array]:
    total = lax.psum_scatter(
        cotangent.astype(jnp.float32), axes, scatter_dimension=dimension, tiled=True
    )
    return (total.astype(cotangent.dtype),)


gather.defvjp(_gather_forward, _gather_backward)


def save_all_but_gathered(primitive: Primitive, *arrays: Any, **parameters: Any) -> bool:
    """Rematerialisation policy for :func:`jax.checkpoint` that saves all but gathered parameters.

    The backward pass gathers them again. Otherwise every device would come to store all parameters.
    """
    # Gathered tokens are integers (see sharding.token_packer), so that they are saved.
    return primitive.name != "all_gather" or not jnp.issubdtype(arrays[0].dtype, jnp.floating)


def _by_dimension(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """Returns the mesh axes that shard each of ``ndim`` dimensions, major first."""
    axes = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec]
    return axes + [()] * (ndim - len(axes))
