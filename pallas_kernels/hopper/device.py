"""The check for a Hopper GPU, and its number of multiprocessors."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.target import compute_capability, device_kind, platform

H200_SMS = 132
"""Multiprocessors of an H100 or H200 (SXM). Programs that are compiled without a GPU assume it."""


def require_hopper(interpret: Any = None) -> None:
    """Raises unless the program is for a Hopper GPU, or the kernel runs in the interpreter.

    Args:
      interpret: parameters of the interpreter, or None.

    Raises:
      NotImplementedError: :mod:`pallas_kernels.target` is not a GPU of compute capability 9.0.
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
    """Returns the number of multiprocessors of the default device, or H200_SMS if it is no GPU."""
    return getattr(jax.devices()[0], "core_count", None) or H200_SMS
