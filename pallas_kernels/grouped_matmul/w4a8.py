"""grouped_matmul of float8 rows by int4 matrices on Hopper GPUs, for many tokens per group (w4a8).

    out[m] = sum_b lhs_scale[m, b] * rhs_scale[g(m), :, b] * (rhs[g(m), :, b] @ lhs[m, b])

where b is a block of 128 columns, g(m) the group of row m.

Every int4 is a float8_e4m3fn number, so the tensor cores multiply float8 by float8, and the result
is that of the unrounded integers: :mod:`reference` is the specification. Compared with bfloat16
rows, the only loss is the rounding of the rows to float8.

The matrices are read as they are stored, in 4 bits, and converted in registers. For that, XLA
permutes the columns of the rows and transposes the scales.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.grouped_matmul import reference, w4a8_kernel
from pallas_kernels.grouped_matmul.w4a8_kernel import BLOCK, FEATURES, Config
from pallas_kernels.hopper import multiprocessors, require_hopper

_INTERPRETED_BLOCKS = 2
_FEW = 64  # rows per group, on average, up to which tiles have 64 of them


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: reference.Matrices,
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None = None,
    rhs_scale: Float32[Array, "G Nb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """grouped_matmul of float8 rows by int4 matrices.

    Args:
      config: tile configuration, by default chosen from the number of rows per group.
      interpret: parameters of Pallas' interpreter, or None to run on a GPU.

    Raises:
      NotImplementedError: no Hopper GPU, or see :func:`check_shapes`.
    """
    require_hopper(interpret)
    check_shapes(lhs, rhs, block_shape)
    assert lhs_scale is not None, "reference.check_scales has been called"
    assert rhs_scale is not None, "reference.check_scales has been called"
    M, G = len(lhs), len(rhs)
    config = config or Config(64 if M <= _FEW * G else 128)
    # A tile's rows are copied whole. TMA fills with zeros past the end; the interpreter does not.
    padding = max(0, config.tokens - M) if interpret is None else config.tokens
    scale_padding = max(-M % 4, config.scale_copy - M) if interpret is None else config.scale_copy
    return w4a8_kernel.matmul(
        jnp.pad(permute_columns(lhs), ((0, padding), (0, 0))),
        rhs,
        group_sizes,
        jnp.pad(lhs_scale, ((0, scale_padding), (0, 0))).T,
        jnp.swapaxes(rhs_scale, 1, 2),
        M=M,
        config=config,
        thread_blocks=multiprocessors() if interpret is None else _INTERPRETED_BLOCKS,
        interpret=interpret,
    )


def check_shapes(lhs: jax.Array, rhs: jax.Array, block_shape: tuple[int, int]) -> None:
    """Raises NotImplementedError for dtypes or shapes that the kernel does not support."""
    (_, K), N = lhs.shape, rhs.shape[1]
    if rhs.dtype != jnp.uint8 or block_shape != (1, BLOCK):
        raise NotImplementedError(
            f"takes int4 matrices with scales of 1 x {BLOCK}, got {rhs.dtype} with {block_shape}"
        )
    if lhs.dtype != FLOAT8 or 0 in (lhs.size, rhs.size):
        raise NotImplementedError(
            f"takes {jnp.dtype(FLOAT8)} rows and no empty arrays, got {lhs.dtype} {lhs.shape} by"
            f" {rhs.shape}"
        )
    check_widths(N, K)


def check_widths(N: int, K: int) -> None:
    """Raises NotImplementedError for matrices [N, K] that the kernel does not support."""
    if N % FEATURES or K % BLOCK:
        raise NotImplementedError(f"takes N in {FEATURES} and K in {BLOCK}, got {N=} {K=}")


def permute_columns(lhs: Float[Array, "M K"]) -> Float[Array, "M K"]:
    """Permutes the columns of every block of 128 to the order in which the kernel unpacks weights.

    Thread q of four reads 16 of the 64 bytes that a weight row has per block: columns 32 q to 32 q
    + 31. The low halves of its i-th word are what it has of columns 4 q to 4 q + 3 in the operand
    of the i-th instruction of 32 columns, and the high halves of columns 16 + 4 q to 16 + 4 q + 3.
    """
    M, K = lhs.shape
    # (quarter, instruction, byte, half) to (instruction, half, quarter, byte)
    blocks = lhs.reshape(M, K // BLOCK, 4, 4, 4, 2)
    return blocks.transpose(0, 1, 3, 5, 2, 4).reshape(M, K)
