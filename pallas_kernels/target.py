"""The device that a program is traced for, which need not be one of this machine.

Inside shard_map, and where a mesh is in use, it is the mesh's: a topology's devices compile for
TPUs or GPUs that are not there. Elsewhere it is the default device.
"""

from __future__ import annotations

import re

import jax


def platform() -> str:
    """``cpu``, ``gpu`` or ``tpu``."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
    """As its maker names it, such as ``TPU v5 lite``."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.devices()[0] if device is None else device).device_kind


def compute_capability() -> str:
    """Of a GPU, such as ``9.0``; ``unknown`` of other devices, and of a GPU that is not here and is
    none of the Hopper generation's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return getattr(jax.devices()[0], "compute_capability", "unknown")
    # A mesh tells no more of its devices than their names.
    return "9.0" if re.search(r"\bG?H(20|100|200|800)\b", device.device_kind) else "unknown"
