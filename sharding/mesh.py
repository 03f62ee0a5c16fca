"""Construction of device meshes with named axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

MESH_AXES = ("data", "expert", "tensor")
"""Names of the mesh axes. By default they shard the batch, experts, and dimensions of matrices."""


def make_mesh(
    *,
    data: int = 1,
    expert: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
    """Returns a mesh of exactly ``data * expert * tensor`` devices.

    All axes are Auto, because ``ragged_dot`` has no sharding rule for Explicit ones.

    Args:
      devices: the devices of the mesh; None takes all of :func:`jax.devices`.

    Raises:
      ValueError: the sizes do not multiply to the number of devices, or the devices are TPUs of
        several slices.
    """
    sizes = (data, expert, tensor)
    devices = jax.devices() if devices is None else devices
    if min(sizes) < 1 or math.prod(sizes) != len(devices):
        stated = " x ".join(f"{name}={size}" for name, size in zip(MESH_AXES, sizes, strict=True))
        raise ValueError(
            f"mesh: expected sizes that multiply to {len(devices)} devices, got {stated}"
        )
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if devices[0].platform == "tpu" and len(slices) > 1:
        raise ValueError(f"mesh: expected TPUs of one slice, got {len(slices)} slices")
    # jax.make_mesh has two limits. It splits a physical axis of a TPU slice only on v5e, although 8
    # of a v6e's 16 devices may have to form a mesh axis too. And it refuses GPUs of several hosts,
    # which JAX calls slices.
    array = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(array, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def abstract_mesh(*, data: int = 1, expert: int = 1, tensor: int = 1) -> AbstractMesh:
    """Returns a mesh of these sizes without devices, to compute shapes and shardings."""
    return AbstractMesh((data, expert, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3)
