"""What the TPU kernels (Pallas Mosaic TPU) share: where they run, and what fits into VMEM there.

A TensorCore computes on what lies in its VMEM. Pallas copies blocks of the operands there from HBM
and results back, each block twice over: one is copied while the other is computed with. So the sum
of a kernel's blocks decides what sizes it can take, and is compared here before the compiler does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels.target import device_kind, platform

LANES, SUBLANES = 128, 8
"""Columns and rows of a vector register, of 32 bits each."""

SMEM = 2**20
"""Bytes of a core's memory of scalars."""

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Chip:
    name: str
    vmem: int
    """Bytes of a TensorCore."""
    cores: int
    """TensorCores of a JAX device: they share out the "parallel" dimensions of a kernel's grid."""
    float8: bool
    """Whether its registers know float8_e4m3fn; older ones know a float8 of another bias."""

    @property
    def budget(self) -> int:
        """Bytes of VMEM for a kernel; the rest is the compiler's, for what registers spill."""
        return self.vmem * 7 // 8


# jax.experimental.pallas.tpu.get_tpu_info_for_chip, whose figures a test compares; the compiler
# refuses what is above the same bytes of VMEM.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", vmem=128 * _MIB, cores=1, float8=False),
        Chip("v5p", vmem=64 * _MIB, cores=2, float8=False),
        Chip("v6e", vmem=128 * _MIB, cores=1, float8=False),
        # A half of a chip, as its own device.
        Chip("tpu7x", vmem=64 * _MIB, cores=1, float8=True),
    )
}

_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}

_INTERPRETED = CHIPS["v5p"]  # of the least VMEM


def require_tpu(interpret: Any = None) -> Chip:
    """The chip that a kernel is to be made for: :mod:`pallas_kernels.target`.

    Args:
      interpret: as pallas_call takes it. An interpreted kernel runs anywhere, made for a v5p.

    Raises:
      NotImplementedError: no TPU, or one that is not in CHIPS.
    """
    if interpret:
        return _INTERPRETED
    if platform() != "tpu":
        raise NotImplementedError(f"runs on TPUs, this is {platform()}")
    if (kind := device_kind()) not in _KINDS:
        raise NotImplementedError(f"runs on TPUs {', '.join(CHIPS)}, this is a {kind}")
    return CHIPS[_KINDS[kind]]


def tiled_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Bytes of a block in VMEM, at most: its last two dimensions fill whole tiles of 8 x 128 words
    of 32 bits, of which narrower numbers share one, rows of a column together."""
    *batch, rows, columns = (1, 1, *shape)
    tiles = math.prod(batch) * -(-rows // tile_rows(dtype)) * -(-columns // LANES)
    return tiles * SUBLANES * LANES * 4


def tile_rows(dtype: DTypeLike) -> int:
    """8 of float32, 16 of bfloat16, 32 of float8."""
    return SUBLANES * (32 // _bits(dtype))


def _bits(dtype: DTypeLike) -> int:
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits


def require_vmem(chip: Chip, blocks: Mapping[str, int]) -> None:
    """Refuses blocks that do not fit into VMEM together.

    Args:
      blocks: name -> bytes, twice those of a block where it is double-buffered.

    Raises:
      NotImplementedError: the sum is above ``chip.budget``; names each in MiB.
    """
    if (total := sum(blocks.values())) > chip.budget:
        parts = ", ".join(f"{name} {size / _MIB:.1f}" for name, size in blocks.items())
        raise NotImplementedError(
            f"takes blocks of {chip.budget / _MIB:.0f} MiB of VMEM at most on a {chip.name}, got"
            f" {total / _MIB:.1f} ({parts})"
        )


def dot(
    a: Float[Array, "M K"], b: Float[Array, "rows columns"], *, transposed: bool = False
) -> Float32[Array, "M N"]:
    """``a b``, or ``a b^T``, inside a kernel; float32 numbers are not rounded to bfloat16 first.

    Args:
      b: [K, N], transposed [N, K].
    """
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
