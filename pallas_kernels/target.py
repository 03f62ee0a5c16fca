"""The device for which a program is traced. It need not be present on this machine.

Inside shard_map, and if a mesh is in use, it is the mesh's device: the mesh may be of a topology
description, for which programs are compiled without the hardware. Otherwise it is the default
device.
"""

from __future__ import annotations

import re

import jax


def platform() -> str:
    """Returns ``cpu``, ``gpu`` or ``tpu``."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
    """Returns the vendor's name of the device, such as ``TPU v5 lite``."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.devices()[0] if device is None else device).device_kind


def compute_capability() -> str:
    """Returns the compute capability of a GPU, such as ``9.0``. It is ``unknown`` for other
    devices, and for GPUs of a topology description that are not of the Hopper generation."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return getattr(jax.devices()[0], "compute_capability", "unknown")
    # A mesh has only the names of its devices.
    return "9.0" if re.search(r"\bG?H(20|100|200|800)\b", device.device_kind) else "unknown"
