"""grouped_matmul for CPUs: a loop over blocks of rows, each of one group.

XLA's CPU compiler expands ``ragged_dot`` to the matmul of every row with every group's matrix. Here
the rows of each group are divided into blocks, and a loop multiplies one block after another: with
few rows per group in blocks of one or two rows, as matrix-vector products, otherwise in blocks of
32. Gradients come from the reference.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.block_quant.reference import FLOAT8, block_dequant
from pallas_kernels.dispatch import with_gradients_of
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.target import platform

_BLOCK_ROWS = 32
_FEW_BLOCK_ROWS = 2  # with up to four rows per group


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: reference.Matrices,
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None = None,
    rhs_scale: Float32[Array, "G Nb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
) -> Float[Array, "M N"]:
    """As :func:`pallas_kernels.grouped_matmul`. Raises NotImplementedError if not on a CPU."""
    if platform() != "cpu":
        raise NotImplementedError(f"runs on CPUs, this is {platform()}")
    specification = functools.partial(reference.grouped_matmul, block_shape=block_shape)
    matmul = with_gradients_of(specification, functools.partial(_grouped_matmul, block_shape))
    return matmul(lhs, rhs, group_sizes, lhs_scale, rhs_scale)


def _grouped_matmul(
    block_shape: tuple[int, int], lhs: Array, rhs: Array, group_sizes: Array,
    lhs_scale: Array | None, rhs_scale: Array | None,
) -> Float[Array, "M N"]:  # fmt: skip
    dtype = jnp.bfloat16 if lhs.dtype == FLOAT8 else lhs.dtype
    if lhs_scale is not None:
        lhs = block_dequant(lhs, lhs_scale, (1, block_shape[1]))
    M, G = lhs.shape[0], rhs.shape[0]
    if rhs_scale is not None and rhs.dtype == FLOAT8 and M > G:
        # Converting float8 is slow, too slow to repeat for each block of rows. Converting integers
        # is faster than writing and reading a dense copy of all matrices.
        rhs, rhs_scale = block_dequant(rhs, rhs_scale, block_shape, lhs.dtype), None
    rows = 1 if M <= G else _FEW_BLOCK_ROWS if M <= 4 * G else _BLOCK_ROWS
    blocks = -(-group_sizes // rows)
    ends = jnp.cumsum(blocks)
    first_row = jnp.cumsum(group_sizes) - group_sizes
    lhs = jnp.pad(lhs, ((0, rows), (0, 0)))  # the last block may extend past the end

    def compute_block(i: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.searchsorted(ends, i, side="right")
        row = first_row[group] + (i - ends[group] + blocks[group]) * rows
        matrix = rhs[group]
        if rhs_scale is not None:
            matrix = block_dequant(matrix, rhs_scale[group], block_shape, lhs.dtype)
        block = jax.lax.dynamic_slice_in_dim(lhs, row, rows)
        result = _multiply(block, matrix.astype(lhs.dtype))
        # A block may extend into the next group's rows, which that group's own blocks overwrite.
        return jax.lax.dynamic_update_slice_in_dim(out, result.astype(dtype), row, axis=0)

    # The trip count is dynamic, so rows past the groups' sum (a chunk's padding) cost nothing.
    out = jax.lax.fori_loop(0, ends[-1], compute_block, jnp.zeros((M + rows, rhs.shape[1]), dtype))
    return out[:M]


def _multiply(rows: Float[Array, "R K"], matrix: Float[Array, "N K"]) -> Float32[Array, "R N"]:
    f32 = jnp.float32
    if rows.shape[0] == _BLOCK_ROWS:
        return jnp.einsum("rk,nk->rn", rows, matrix, preferred_element_type=f32)
    # One or two rows are multiplied one by one: XLA's matmul is slower for them.
    return jnp.stack([jnp.dot(matrix, row, preferred_element_type=f32) for row in rows])
