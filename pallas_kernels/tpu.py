"""Shared by the TPU kernels (Pallas Mosaic TPU): chips, VMEM, a matmul and an online softmax.

A TensorCore computes on data in its VMEM. Pallas copies blocks of the operands there from HBM and
blocks of the results back, with double buffering: one block is copied while another is used. So the
sum of a kernel's blocks limits their sizes. It is checked here, before the compiler would fail.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels.target import device_kind, platform

LANES, SUBLANES = 128, 8  # columns and rows of a vector register of 32-bit elements

SMEM = 2**20  # bytes of scalar memory per core
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU generation."""

    name: str
    vmem: int  # bytes of VMEM per TensorCore
    cores: int
    """TensorCores per JAX device. They divide the "parallel" dimensions of a kernel's grid."""
    float8: bool
    """Whether registers support float8_e4m3fn. Older chips have float8_e4m3b11fnuz instead."""

    @property
    def budget(self) -> int:
        """Bytes of VMEM for the blocks of a kernel. The compiler needs the rest for spills."""
        return self.vmem * 7 // 8


# A test compares these with jax.experimental.pallas.tpu.get_tpu_info_for_chip. The compiler refuses
# kernels that need more VMEM.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", vmem=128 * _MIB, cores=1, float8=False),
        Chip("v5p", vmem=64 * _MIB, cores=2, float8=False),
        Chip("v6e", vmem=128 * _MIB, cores=1, float8=False),
        # Each half of the chip is a device of its own.
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

_INTERPRETED = CHIPS["v5p"]  # has the least VMEM


def require_tpu(interpret: Any = None) -> Chip:
    """Returns the chip that the program is traced for, see :mod:`pallas_kernels.target`, or a v5p
    for an interpreted kernel, which runs anywhere. Raises NotImplementedError for no TPU, or one
    that is not in CHIPS."""
    if interpret:
        return _INTERPRETED
    if platform() != "tpu":
        raise NotImplementedError(f"runs on TPUs, this is {platform()}")
    if (kind := device_kind()) not in _KINDS:
        raise NotImplementedError(f"runs on TPUs {', '.join(CHIPS)}, this is a {kind}")
    return CHIPS[_KINDS[kind]]


def tiled_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Returns an upper bound of the bytes of a block in VMEM. The last two dimensions are padded to
    whole tiles of 8 x 128 words of 32 bits. Narrower elements share a word with those of
    neighbouring rows."""
    *batch, rows, columns = (1, 1, *shape)
    tiles = math.prod(batch) * -(-rows // tile_rows(dtype)) * -(-columns // LANES)
    return tiles * SUBLANES * LANES * 4


def tile_rows(dtype: DTypeLike) -> int:
    """Returns the rows of a tile: 8 for float32, 16 for bfloat16, 32 for float8."""
    info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
    return SUBLANES * (32 // info.bits)


def require_vmem(chip: Chip, blocks: Mapping[str, int]) -> None:
    """Raises NotImplementedError if the blocks of a kernel, bytes by name, do not fit in VMEM
    together. A double-buffered block counts twice. The message lists the blocks in MiB."""
    if (total := sum(blocks.values())) > chip.budget:
        parts = ", ".join(f"{name} {size / _MIB:.1f}" for name, size in blocks.items())
        raise NotImplementedError(
            f"takes blocks of {chip.budget / _MIB:.0f} MiB of VMEM at most on a {chip.name}, got"
            f" {total / _MIB:.1f} ({parts})"
        )


def dot(
    a: Float[Array, "M K"], b: Float[Array, "rows columns"], *, transposed: bool = False
) -> Float32[Array, "M N"]:
    """Multiplies inside a kernel, in full precision: float32 is not rounded to bfloat16 first.
    ``b`` is [K, N], or [N, K] if ``transposed``."""
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


class OnlineSoftmax(NamedTuple):
    """State of an online softmax (Milakov and Gimelshein, 2018) that reads the keys in chunks.

    For each query row the state is the largest score so far, the sum of exponentials relative to
    it, and the sum of the values weighted by them, in float32. A chunk with scores S and values V
    updates it by::

        top' = max(top, rowmax S)       P = exp(S - top')       decay = exp(top - top')
        total' = decay total + rowsum P     acc' = decay acc + P V

    The state is that of a tile of query rows, in VMEM. All fields are float32 references.
    """

    top: Any  # largest score of each row, [rows, 1]
    total: Any  # sum of the exponentials of each row, [rows, 1]
    acc: Any  # weighted sum of the values, [rows, V]

    @staticmethod
    def scratch(rows: int, columns: int) -> list[Any]:
        """Returns the scratch types of the three fields, where ``columns`` is V."""
        return [pltpu.VMEM((rows, n), jnp.float32) for n in (1, 1, columns)]

    def clear(self) -> None:
        """Initialises the state for no keys."""
        self.top[...] = jnp.full_like(self.top, -jnp.inf)
        self.total[...] = jnp.zeros_like(self.total)
        self.acc[...] = jnp.zeros_like(self.acc)

    def add(self, scores: Float32[Array, "rows S"], values: Float[Array, "S V"]) -> None:
        """Adds a chunk of keys. The score of a masked key is -inf, and its value must be finite."""
        top = jnp.maximum(self.top[...], jnp.max(scores, axis=1, keepdims=True))
        # Without this, rows that have seen no key would compute exp(-inf - -inf), which is NaN.
        finite = jnp.where(top == -jnp.inf, 0.0, top)
        weights, decay = jnp.exp(scores - finite), jnp.exp(self.top[...] - finite)
        self.top[...] = top
        self.total[...] = decay * self.total[...] + jnp.sum(weights, axis=1, keepdims=True)
        self.acc[...] = decay * self.acc[...] + dot(weights.astype(values.dtype), values)

    def result(self) -> tuple[Float32[Array, "rows V"], Float32[Array, "1 rows"]]:
        """Returns the attention and its log-sum-exp. A row without keys has zeros and -inf."""
        total = self.total[...]
        out = self.acc[...] / jnp.where(total == 0.0, 1.0, total)
        return out, (self.top[...] + jnp.log(total)).reshape(1, -1)


def softmax_bytes(rows: int, columns: int, chunk: int, width: int) -> dict[str, int]:
    """Returns bytes of VMEM, by name, of the state of ``rows`` query rows with ``columns`` of
    values, and of the scores of one chunk of keys. ``width`` is that of the widest key or value."""
    f32 = jnp.float32
    return {
        "sums": tiled_bytes((rows, columns), f32) + 2 * tiled_bytes((rows, 1), f32),
        # Scores, weights, and operands of the matrix unit: float32 is passed as three bfloat16.
        "scores": 4 * tiled_bytes((rows, chunk), f32) + 2 * tiled_bytes((chunk, width), f32),
    }
