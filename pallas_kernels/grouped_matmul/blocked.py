"""grouped_matmul as one batched matmul, for GPUs without a kernel of their own.

XLA's ragged product multiplies every row with every group's matrix there. Here each group's rows
are padded to whole blocks, each block takes a copy of its group's matrix, and one batched matmul
does the rest: ``blocks <= M / rows + G`` products of [rows, K] by [K, N] instead of G of [M, K] by
[K, N]. Gradients take the same way, summed in float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.block_quant.reference import FLOAT8, block_dequant
from pallas_kernels.grouped_matmul.reference import Matrices, dense_rows
from pallas_kernels.target import platform

_MAX_ROWS = 512  # of a block: past this, padding costs more than copies of matrices
_MIN_ROWS = 16
_MAX_COPIES = 2**30  # bytes of matrices, as many as there are blocks


class _Layout(NamedTuple):
    """Where rows go: ``blocks`` blocks of ``rows`` rows, each of one group alone."""

    groups: Int[Array, " blocks"]
    sources: Int[Array, " slots"]
    """The row in each slot; M and up where it is padding, all different."""
    slots: Int[Array, " M"]
    """The slot of each row; out of bounds, all different, past the last group's rows."""


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: Matrices,
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None = None,
    rhs_scale: Float32[Array, "G Nb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
) -> Float[Array, "M N"]:
    if platform() == "tpu":
        raise NotImplementedError("XLA's ragged product is a kernel on TPUs")
    (M, K), (G, N) = lhs.shape, rhs.shape[:2]
    rows = min(_MAX_ROWS, 1 << max(M // (2 * G), 1).bit_length() - 1)
    if rows < _MIN_ROWS:
        raise NotImplementedError(f"takes {2 * _MIN_ROWS} rows a group and more, got {M} for {G}")
    dtype = jnp.bfloat16 if lhs.dtype == FLOAT8 else lhs.dtype
    lhs = dense_rows(lhs, lhs_scale, block_shape)
    copies = (M // rows + G) * N * K * lhs.dtype.itemsize
    if copies > _MAX_COPIES:
        raise NotImplementedError(f"would copy {copies} bytes of matrices")
    if rhs_scale is not None:
        rhs = block_dequant(rhs, rhs_scale, block_shape)
    out: jax.Array = _product(lhs, rhs.astype(lhs.dtype), group_sizes.astype(jnp.int32), rows)
    return out.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(
    lhs: Float[Array, "M K"], rhs: Float[Array, "G N K"], group_sizes: Int[Array, " G"], rows: int
) -> Float[Array, "M N"]:
    layout = _layout(group_sizes, lhs.shape[0], rows)
    blocks = _spread(lhs, layout, rows)
    out = jnp.einsum("bmk,bnk->bmn", blocks, rhs[layout.groups], preferred_element_type=jnp.float32)
    return _gather(out.astype(lhs.dtype), layout)


def _forward(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, rows: int
) -> tuple[jax.Array, Any]:
    return _product(lhs, rhs, group_sizes, rows), (lhs, rhs, group_sizes)


def _backward(rows: int, kept: Any, d_out: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    lhs, rhs, group_sizes = kept
    f32 = jnp.float32
    layout = _layout(group_sizes, lhs.shape[0], rows)
    d_blocks = _spread(d_out, layout, rows)
    d_lhs = jnp.einsum("bmn,bnk->bmk", d_blocks, rhs[layout.groups], preferred_element_type=f32)
    shares = jnp.einsum(
        "bmn,bmk->bnk", d_blocks, _spread(lhs, layout, rows), preferred_element_type=f32
    )
    d_rhs = jax.ops.segment_sum(
        shares, layout.groups, num_segments=rhs.shape[0], indices_are_sorted=True
    )
    return _gather(d_lhs.astype(lhs.dtype), layout), d_rhs.astype(rhs.dtype), None


_product.defvjp(_forward, _backward)


def _layout(group_sizes: Int[Array, " G"], M: int, rows: int) -> _Layout:
    G = group_sizes.shape[0]
    blocks = M // rows + G
    padded = -(-group_sizes // rows) * rows
    ends, padded_ends = jnp.cumsum(group_sizes), jnp.cumsum(padded)
    shift = (padded_ends - padded) - (ends - group_sizes)  # of a group's rows to its slots
    first_slots = jnp.arange(blocks) * rows
    # Blocks past the last group's hold nothing, and multiply it with the last matrix.
    groups = jnp.minimum(jnp.searchsorted(padded_ends, first_slots, side="right"), G - 1)
    slot = jnp.arange(blocks * rows)
    group_of_slot = jnp.repeat(groups, rows)
    source = slot - shift[group_of_slot]
    held = (source < ends[group_of_slot]) & (slot < padded_ends[-1])
    row = jnp.arange(M)
    group_of_row = jnp.minimum(jnp.searchsorted(ends, row, side="right"), G - 1)
    slots = jnp.where(row < ends[-1], row + shift[group_of_row], blocks * rows + row)
    return _Layout(groups, jnp.where(held, source, M + slot), slots)


def _spread(x: Float[Array, "M K"], layout: _Layout, rows: int) -> Float[Array, "blocks rows K"]:
    """Rows into their slots, zeros between them."""
    spread = x.at[layout.sources].get(mode="fill", fill_value=0)
    return spread.reshape(-1, rows, x.shape[1])


def _gather(blocks: Float[Array, "blocks rows N"], layout: _Layout) -> Float[Array, "M N"]:
    """Rows out of their slots."""
    flat = blocks.reshape(-1, blocks.shape[-1])
    return flat.at[layout.slots].get(mode="fill", fill_value=0)
