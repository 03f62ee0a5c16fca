"""grouped_matmul for decoding on Hopper GPUs: few bfloat16 rows a group, quantized matrices.

Reading the matrices is all the time there is, so they are read once, as they are stored. The
products are ``out^T = W x^T``: 64 matrix rows are the tall side of a tensor core product, and the
few rows of a group its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.grouped_matmul import few_rows_kernel, reference
from pallas_kernels.grouped_matmul.few_rows_plan import Config, Weights
from pallas_kernels.grouped_matmul.waves import best_cut
from pallas_kernels.hopper import multiprocessors, require_hopper

_FORMATS = {jnp.dtype(jnp.int8): "int8", jnp.dtype(jnp.uint8): "int4", jnp.dtype(FLOAT8): "float8"}
_CLASSES = (8, 16, 32, 64)


def default_config(M: int, G: int, weights: Weights, count: int = 1) -> Config:
    """What the shapes alone can say; how the rows fall into groups is not known when compiling.
    ``count`` matrices a group."""
    mean = -(-M // G)
    # Groups are uneven, the more so the fewer rows they have.
    most = min(M, 4 * mean if mean <= 4 else 2 * mean)
    last = next((i for i, c in enumerate(_CLASSES) if c >= most), len(_CLASSES) - 1)
    classes = _CLASSES[max(last - 2, 0) : last + 1]
    # Four warpgroups have too few registers for sums 64 wide beside much else, and tiles of three
    # rarely fill the last wave.
    wide = classes[-1] == 64
    widest = 128 if wide and weights.format != "int8" else 256
    warpgroups = {w: 2 if wide and w < 256 else 4 for w in (256, 128, 64)}
    split = {w: 64 * warpgroups[w] // w for w in warpgroups if w <= min(widest, weights.N)}
    width, pieces = best_cut(
        {width: max(1, weights.steps // parts) for width, parts in split.items()},
        M,
        G,
        count * weights.N,
        matrix_row=weights.K * weights.bits // 8,
        row=2 * weights.K,
    )
    return Config(warpgroups[width], classes, split[width], pieces)


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
    """As :func:`pallas_kernels.grouped_matmul`; raises as :func:`grouped_products`."""
    scales = () if rhs_scale is None else (rhs_scale,)
    settings: Any = {"block_shape": block_shape, "config": config, "interpret": interpret}
    return grouped_products(lhs, (rhs,), group_sizes, scales, **settings)


def grouped_products(
    lhs: Float[Array, "M K"],
    matrices: Sequence[reference.Matrices],
    group_sizes: Int[Array, " G"],
    scales: Sequence[Float32[Array, "G Nb Kb"]],
    *,
    block_shape: tuple[int, int] = (128, 128),
    config: Config | None = None,
    interpret: Any = None,
) -> BFloat16[Array, "M N_of_all"]:
    """Every row times each of its group's matrices, alike in shape and dtype; the results stand
    side by side. Of any group sizes, best at 1 to 64 rows a group.

    One kernel for all of them: to start and to end takes each several microseconds.

    Raises:
      NotImplementedError: rows that are not bfloat16, matrices that are neither int8, int4 nor
        float8_e4m3fn, blocks of scales that a product cannot have to itself, N or K of odd widths.
    """
    require_hopper(interpret)
    first = matrices[0]
    if lhs.dtype != jnp.bfloat16 or not scales or first.dtype not in _FORMATS:
        raise NotImplementedError(
            f"takes bfloat16 rows and int8, int4 or float8 matrices, got {lhs.dtype}, {first.dtype}"
        )
    (M, K), (G, N) = lhs.shape, first.shape[:2]
    weights = Weights.of(_FORMATS[jnp.dtype(first.dtype)], N, K, block_shape)
    if config is None:
        config = default_config(M, G, weights, len(matrices))
    # A tile is copied whole; past the array's end come zeros, but not in the interpreter.
    rows = max(M, config.most_rows) if interpret is None else M + config.most_rows
    pieces = few_rows_kernel.product(
        arranged(lhs, weights, rows),
        tuple(matrices),
        tuple(scales),
        group_sizes,
        M=M,
        weights=weights,
        config=config,
        blocks_of_grid=multiprocessors() if interpret is None else 2,
        interpret=interpret,
    )
    return pieces[0] if len(pieces) == 1 else jnp.sum(pieces, axis=0).astype(lhs.dtype)


def arranged(
    lhs: BFloat16[Array, "M K"], weights: Weights, rows: int
) -> BFloat16[Array, "blocks rows 64"]:
    """Rows with their columns in the order in which the kernel comes by the matrices' columns.

    A thread reads 16 bytes of a matrix row and unpacks them where they are. What it then holds is
    no operand of a tensor core product unless the columns change places, and it is far cheaper to
    move them in the few rows than in the matrix. Blocks of 64 columns, one after another, with
    zeros up to so many ``rows``.
    """
    M, K = lhs.shape
    if weights.bits == 8:  # thread, word, (pair, half): of each word bytes 0, 2 and then 1, 3
        x = lhs.reshape(M, K // 64, 4, 4, 2, 2).transpose(1, 0, 3, 5, 2, 4)
    else:  # thread, (block, word), pair, (slice, half): of each word halves bytes 0, 4; 1, 5; ...
        x = lhs.reshape(M, K // 128, 4, 2, 2, 2, 2, 2).transpose(1, 3, 0, 4, 6, 7, 2, 5)
    return jnp.pad(x.reshape(K // 64, M, 64), ((0, 0), (0, rows - M), (0, 0)))
