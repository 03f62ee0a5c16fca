"""What the Hopper kernels (Pallas Mosaic GPU) share: where they run, how wide the machine is."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.target import compute_capability, device_kind, platform

H200_SMS = 132
"""Multiprocessors of an H100 or H200 (SXM): what programs compiled without a GPU assume."""


def require_hopper(interpret: Any = None) -> None:
    """Refuses every machine but a Hopper GPU, unless the kernel is to be interpreted.

    Raises:
      NotImplementedError: no GPU of compute capability 9.0: :mod:`pallas_kernels.target`.
    """
    if interpret is not None:
        return
    if platform() != "gpu":
        raise NotImplementedError(f"runs on Hopper GPUs, this is {platform()}")
    if (capability := compute_capability()) != "9.0":
        raise NotImplementedError(
            f"runs on Hopper GPUs (compute capability 9.0), this is a {device_kind()}"
            f" of {capability}"
        )


def multiprocessors() -> int:
    """Multiprocessors of the default device; an H200's where it is no GPU."""
    return getattr(jax.devices()[0], "core_count", None) or H200_SMS
