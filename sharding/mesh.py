"""Named axes of devices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

AXES = ("data", "expert", "tensor")
"""Requests, experts, and the columns of matrices: what each axis of a mesh may split."""


def make_mesh(
    *,
    data: int = 1,
    expert: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
    """A mesh of exactly ``data * expert * tensor`` devices.

    All axes are Auto: ``ragged_dot`` has no sharding rule for Explicit ones.

    Raises:
      ValueError: the sizes do not multiply to the number of devices, or TPUs of several slices.
    """
    sizes = (data, expert, tensor)
    devices = jax.devices() if devices is None else devices
    if min(sizes) < 1 or math.prod(sizes) != len(devices):
        stated = " x ".join(f"{name}={size}" for name, size in zip(AXES, sizes, strict=True))
        raise ValueError(
            f"mesh: expected sizes that multiply to {len(devices)} devices, got {stated}"
        )
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if devices[0].platform == "tpu" and len(slices) > 1:
        raise ValueError(f"mesh: expected TPUs of one slice, got {len(slices)} slices")
    # Not jax.make_mesh: it cuts a dimension of a slice in two on v5e alone, where 8 of a v6e's 16
    # may have to be an axis too, and refuses GPUs of several hosts, which JAX calls slices.
    placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * 3)


def abstract_mesh(*, data: int = 1, expert: int = 1, tensor: int = 1) -> AbstractMesh:
    """The same of no devices, for shapes and shardings alone."""
    return AbstractMesh((data, expert, tensor), AXES, axis_types=(AxisType.Auto,) * 3)
