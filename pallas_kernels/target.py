"""The device that a program is traced for, which need not be one of this machine.

Inside shard_map it is the mesh's: a topology's devices compile for TPUs or GPUs that are not there.
Elsewhere it is the default device.
"""

from __future__ import annotations

import jax


def platform() -> str:
    """``cpu``, ``gpu`` or ``tpu``."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def device_kind() -> str:
    """As its maker names it, such as ``TPU v5 lite``."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.devices()[0] if device is None else device).device_kind
