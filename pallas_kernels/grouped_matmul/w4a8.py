"""grouped_matmul of float8 rows by int4 matrices on Hopper GPUs, for many tokens per group (w4a8).

    out[m] = sum_b lhs_scale[m, b] * rhs_scale[g(m), :, b] * (rhs[g(m), :, b] @ lhs[m, b])

where b is a block of 128 columns, g(m) the group of row m.

Every int4 is a float8_e4m3fn number, so the tensor cores multiply float8 by float8, and the result
is that of the unrounded integers: :mod:`reference` is the specification. Compared with bfloat16
rows, the only loss is the rounding of the rows to float8.

The matrices are read in 4 bits and converted in registers. For that, the halves of bytes have an
order of their own, and the scales are transposed. :func:`arrange` does both, once when a model is
loaded, or in every call if the matrices come as they are stored.

The back-end has not run on a GPU yet, so it is never chosen: a caller names it. It has no gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.grouped_matmul import reference, w4a8_kernel
from pallas_kernels.grouped_matmul.w4a8_kernel import BLOCK, FEATURES, Config
from pallas_kernels.hopper import multiprocessors, require_hopper

_INTERPRETED_BLOCKS = 2
_FEW = 64  # rows per group, on average, up to which tiles have 64 of them


class Arranged(NamedTuple):
    """int4 matrices as the kernel reads them."""

    values: UInt8[Array, "G N K2"]
    """Bytes of two numbers, in an order within every 64 bytes that :func:`arrange` defines."""

    scales: Float32[Array, "G Kb N"]


def arrange(rhs: UInt8[Array, "G N K2"], rhs_scale: Float32[Array, "G N Kb"]) -> Arranged:
    """Arranges int4 matrices, packed as :func:`pallas_kernels.block_quant` packs them.

    A thread of the kernel reads 16 of the 64 bytes that 128 columns have. They must be the columns
    that it has in an operand of wgmma: 4q to 4q + 3 and 16 + 4q to 16 + 4q + 3 of each 32, where q
    is the index of the 16 bytes. The low halves of 4 bytes are the former, the high halves the
    latter.
    """
    G, N, half = rhs.shape
    columns = jnp.stack([rhs & 15, rhs >> 4], axis=-1)
    # (instruction, half, quarter, column) to (quarter, instruction, column, half)
    columns = columns.reshape(G, N, half // 64, 4, 2, 4, 4).transpose(0, 1, 2, 5, 3, 6, 4)
    values = columns[..., 0] | (columns[..., 1] << 4)
    return Arranged(values.reshape(G, N, half), jnp.swapaxes(rhs_scale, 1, 2))


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
    """grouped_matmul of float8 rows by int4 matrices, which it arranges first.

    Args:
      config: tile configuration, by default chosen from the number of rows per group.
      interpret: parameters of Pallas' interpreter, or None to run on a GPU.

    Raises:
      NotImplementedError: as :func:`arranged_matmul`; matrices that are not int4, or scales of
        blocks other than 1 x 128.
    """
    require_hopper(interpret)
    if rhs.dtype != jnp.uint8 or block_shape != (1, BLOCK):
        raise NotImplementedError(
            f"takes int4 matrices with scales of 1 x {BLOCK}, got {rhs.dtype} with {block_shape}"
        )
    check_shapes(lhs, rhs)
    assert rhs_scale is not None, "reference.check_scales has been called"
    arranged = arrange(rhs, rhs_scale)
    return arranged_matmul(
        lhs, arranged, group_sizes, lhs_scale, config=config, interpret=interpret
    )


def arranged_matmul(
    lhs: Float[Array, "M K"],
    rhs: Arranged,
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None,
    *,
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """grouped_matmul of float8 rows by matrices that :func:`arrange` returned.

    Raises:
      NotImplementedError: no Hopper GPU, rows that are not float8, empty arrays, or N or K not a
        multiple of 128.
    """
    require_hopper(interpret)
    check_shapes(lhs, rhs.values)
    assert lhs_scale is not None, "float8 rows have scales"
    M, G = len(lhs), len(rhs.values)
    config = config or Config(64 if M <= _FEW * G else 128)
    # A tile's rows are copied whole. TMA fills with zeros past the end; the interpreter does not.
    padding = max(0, config.tokens - M) if interpret is None else config.tokens
    scale_padding = max(-M % 4, config.scale_copy - M) if interpret is None else config.scale_copy
    return w4a8_kernel.matmul(
        jnp.pad(lhs, ((0, padding), (0, 0))),
        rhs.values,
        group_sizes,
        jnp.pad(lhs_scale, ((0, scale_padding), (0, 0))).T,
        rhs.scales,
        M=M,
        config=config,
        thread_blocks=multiprocessors() if interpret is None else _INTERPRETED_BLOCKS,
        interpret=interpret,
    )


def check_shapes(lhs: jax.Array, values: jax.Array) -> None:
    """Raises NotImplementedError for rows or shapes that the kernel does not support."""
    (_, K), N = lhs.shape, values.shape[1]
    if lhs.dtype != FLOAT8 or 0 in (lhs.size, values.size) or K % BLOCK or N % FEATURES:
        raise NotImplementedError(
            f"takes {jnp.dtype(FLOAT8)} rows, N in {FEATURES}, K in {BLOCK} and no empty arrays,"
            f" got {lhs.dtype} {lhs.shape} by {values.shape}"
        )
