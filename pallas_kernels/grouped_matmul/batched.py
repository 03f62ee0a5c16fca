"""grouped_matmul as one batched matmul, for GPUs without a Pallas kernel.

On these, XLA's ragged dot multiplies every row with every group's matrix. Here each group's rows
are padded to whole blocks, each block gathers a copy of its group's matrix, and one batched matmul
computes all blocks: at most ``M / block_rows + G`` matmuls of [block_rows, K] by [K, N], instead of
G matmuls of [M, K] by [K, N]. The backward pass uses the same blocks and sums in float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.block_quant.reference import FLOAT8, multiply_dequantized
from pallas_kernels.grouped_matmul.reference import Matrices, dense_rows
from pallas_kernels.target import platform

_MAX_ROWS = 512  # of a block: with more, padding costs more than it saves in copies of matrices
_MIN_ROWS = 16
_MAX_COPIES = 2**30  # bytes of gathered matrices, one per block


class _Padding(NamedTuple):
    """The padded layout of the rows: blocks of equal height, each with rows of one group."""

    groups: Int[Array, " blocks"]  # group of each block
    sources: Int[Array, " slots"]
    """Row that each slot of a block takes. For padding it is M + slot, which is out of bounds and
    unique."""
    slots: Int[Array, " M"]
    """Slot of each row. For rows past the last group it is out of bounds and unique."""


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: Matrices,
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None = None,
    rhs_scale: Float32[Array, "G Nb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
) -> Float[Array, "M N"]:
    """As :func:`pallas_kernels.grouped_matmul`. Raises NotImplementedError on a TPU, for fewer than
    32 rows per group on average, or if the copies of the matrices would exceed 1 GiB."""
    if platform() == "tpu":
        raise NotImplementedError("XLA's ragged dot is a kernel on TPUs")
    (M, K), (G, N) = lhs.shape, rhs.shape[:2]
    block_rows = min(_MAX_ROWS, 1 << max(M // (2 * G), 1).bit_length() - 1)
    if block_rows < _MIN_ROWS:
        raise NotImplementedError(f"takes {2 * _MIN_ROWS} rows a group and more, got {M} for {G}")
    dtype = jnp.bfloat16 if lhs.dtype == FLOAT8 else lhs.dtype
    lhs = dense_rows(lhs, lhs_scale, block_shape)
    copies = (M // block_rows + G) * N * K * lhs.dtype.itemsize
    if copies > _MAX_COPIES:
        raise NotImplementedError(f"would copy {copies} bytes of matrices")

    def multiply(rhs: jax.Array, lhs: jax.Array, sizes: jax.Array) -> jax.Array:
        out: jax.Array = _batched_matmul(lhs, rhs.astype(lhs.dtype), sizes, block_rows)
        return out.astype(dtype)

    sizes = group_sizes.astype(jnp.int32)
    if rhs_scale is None:
        return multiply(rhs, lhs, sizes)
    return multiply_dequantized(multiply, rhs, rhs_scale, block_shape, lhs.dtype, lhs, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _batched_matmul(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "G N K"],
    group_sizes: Int[Array, " G"],
    block_rows: int,
) -> Float[Array, "M N"]:
    padding = _pad_groups(group_sizes, lhs.shape[0], block_rows)
    blocks = _to_blocks(lhs, padding, block_rows)
    out = jnp.einsum(
        "bmk,bnk->bmn", blocks, rhs[padding.groups], preferred_element_type=jnp.float32
    )
    return _from_blocks(out.astype(lhs.dtype), padding)


def _forward(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, block_rows: int
) -> tuple[jax.Array, Any]:
    return _batched_matmul(lhs, rhs, group_sizes, block_rows), (lhs, rhs, group_sizes)


def _backward(
    block_rows: int, residuals: Any, d_out: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    lhs, rhs, group_sizes = residuals
    f32 = jnp.float32
    padding = _pad_groups(group_sizes, lhs.shape[0], block_rows)
    d_blocks = _to_blocks(d_out, padding, block_rows)
    d_lhs = jnp.einsum("bmn,bnk->bmk", d_blocks, rhs[padding.groups], preferred_element_type=f32)
    d_rhs_of_blocks = jnp.einsum(
        "bmn,bmk->bnk", d_blocks, _to_blocks(lhs, padding, block_rows), preferred_element_type=f32
    )
    d_rhs = jax.ops.segment_sum(
        d_rhs_of_blocks, padding.groups, num_segments=rhs.shape[0], indices_are_sorted=True
    )
    return _from_blocks(d_lhs.astype(lhs.dtype), padding), d_rhs.astype(rhs.dtype), None


_batched_matmul.defvjp(_forward, _backward)


def _pad_groups(group_sizes: Int[Array, " G"], M: int, block_rows: int) -> _Padding:
    G = group_sizes.shape[0]
    blocks = M // block_rows + G
    padded = -(-group_sizes // block_rows) * block_rows
    ends, padded_ends = jnp.cumsum(group_sizes), jnp.cumsum(padded)
    shift = (padded_ends - padded) - (ends - group_sizes)  # from a group's rows to its slots
    first_slots = jnp.arange(blocks) * block_rows
    # Blocks past the last group's contain only zeros and use the last matrix.
    groups = jnp.minimum(jnp.searchsorted(padded_ends, first_slots, side="right"), G - 1)
    slot = jnp.arange(blocks * block_rows)
    group_of_slot = jnp.repeat(groups, block_rows)
    source = slot - shift[group_of_slot]
    is_row = (source < ends[group_of_slot]) & (slot < padded_ends[-1])
    row = jnp.arange(M)
    group_of_row = jnp.minimum(jnp.searchsorted(ends, row, side="right"), G - 1)
    slots = jnp.where(row < ends[-1], row + shift[group_of_row], blocks * block_rows + row)
    return _Padding(groups, jnp.where(is_row, source, M + slot), slots)


def _to_blocks(
    x: Float[Array, "M K"], padding: _Padding, block_rows: int
) -> Float[Array, "blocks rows K"]:
    """Gathers rows to their slots, with zeros in the padding."""
    slots = x.at[padding.sources].get(mode="fill", fill_value=0)
    return slots.reshape(-1, block_rows, x.shape[1])


def _from_blocks(blocks: Float[Array, "blocks rows N"], padding: _Padding) -> Float[Array, "M N"]:
    flat = blocks.reshape(-1, blocks.shape[-1])
    return flat.at[padding.slots].get(mode="fill", fill_value=0)
