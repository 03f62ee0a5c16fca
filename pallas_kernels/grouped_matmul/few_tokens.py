"""grouped_matmul for decoding on Hopper GPUs: few bfloat16 tokens per group, quantized matrices.

It is chosen for bfloat16 rows with int8, int4 or float8 matrices and at most 64 tokens per group on
average. The time is that of reading the matrices, so they are read once, in the format in which
they are stored. The matmul is transposed, ``out^T = W x^T``: 64 weight rows are the M dimension of
the tensor core instruction, and the few tokens of a group are its N dimension.

This file chooses the configuration and prepares the operands. The kernel is in
``few_tokens_kernel``, code for single threads in ``few_tokens_registers`` and ``few_tokens_mma``,
tile and weight layout in ``few_tokens_plan``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.grouped_matmul import few_tokens_kernel, reference
from pallas_kernels.grouped_matmul.few_tokens_plan import Config, Weights
from pallas_kernels.grouped_matmul.heuristics import choose_tile_and_split_k
from pallas_kernels.hopper import multiprocessors, require_hopper

_FORMATS = {jnp.dtype(jnp.int8): "int8", jnp.dtype(jnp.uint8): "int4", jnp.dtype(FLOAT8): "float8"}
_TOKEN_WIDTHS = (8, 16, 32, 64)
_MAX_TOKENS_IN_ORDER = 32  # per tile; wider ones use wgmma


def default_config(M: int, G: int, weights: Weights, matrices: int = 1) -> Config:
    """Chooses a configuration from the shapes, since the group sizes are unknown when compiling.

    Args:
      matrices: matrices per group.
    """
    mean = -(-M // G)
    # Group sizes vary, relatively more if groups are small.
    largest = min(M, 4 * mean if mean <= 4 else 2 * mean)
    last = next((i for i, w in enumerate(_TOKEN_WIDTHS) if w >= largest), len(_TOKEN_WIDTHS) - 1)
    token_widths = _TOKEN_WIDTHS[max(last - 2, 0) : last + 1]
    # With four warpgroups there are too few registers for sums of 64 tokens and unpacked
    # weights, and tiles of three warpgroups rarely fill the last wave.
    wide = token_widths[-1] == 64
    max_features = 128 if wide and weights.format != "int8" else 256
    warpgroups = {features: 2 if wide and features < 256 else 4 for features in (256, 128, 64)}
    k_warpgroups = {
        features: 64 * warpgroups[features] // features
        for features in warpgroups
        if features <= min(max_features, weights.N)
    }
    features, split_k = choose_tile_and_split_k(
        {width: max(1, weights.k_steps // shares) for width, shares in k_warpgroups.items()},
        M,
        G,
        matrices * weights.N,
        weight_row_bytes=weights.K * weights.bits // 8,
        token_bytes=2 * weights.K,
    )
    # Not yet timed on a GPU with float8 matrices.
    in_order = weights.format == "int8" and token_widths[-1] <= _MAX_TOKENS_IN_ORDER
    return Config(
        warpgroups[features],
        token_widths,
        k_warpgroups[features],
        split_k,
        tokens_in_order=in_order,
    )


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
    """As :func:`pallas_kernels.grouped_matmul`; raises as :func:`grouped_matmuls`."""
    scales = () if rhs_scale is None else (rhs_scale,)
    settings: Any = {"block_shape": block_shape, "config": config, "interpret": interpret}
    return grouped_matmuls(lhs, (rhs,), group_sizes, scales, **settings)


def grouped_matmuls(
    lhs: Float[Array, "M K"],
    matrices: Sequence[reference.Matrices],
    group_sizes: Int[Array, " G"],
    scales: Sequence[Float32[Array, "G Nb Kb"]],
    *,
    block_shape: tuple[int, int] = (128, 128),
    config: Config | None = None,
    interpret: Any = None,
) -> BFloat16[Array, "M N_of_all"]:
    """Multiplies every token with each of its group's matrices, in one kernel.

    The results are concatenated along the last axis. One kernel is used because starting and
    finishing a kernel takes several microseconds. Any group sizes are correct; 1 to 64 tokens per
    group are fast.

    Args:
      matrices, scales: one of each per result, all of the same shape and dtype.

    Raises:
      NotImplementedError: lhs is not bfloat16; the matrices are not int8, int4 or float8_e4m3fn; or
        N, K or the scale blocks are not multiples of what :class:`Weights` requires.
    """
    require_hopper(interpret)
    first = matrices[0]
    if lhs.dtype != jnp.bfloat16 or not scales or first.dtype not in _FORMATS:
        raise NotImplementedError(
            f"takes bfloat16 rows and int8, int4 or float8 matrices, got {lhs.dtype}, {first.dtype}"
        )
    (M, K), G = lhs.shape, len(first)
    weights = weights_of(first, K, block_shape)
    if config is None:
        config = default_config(M, G, weights, len(matrices))
    # A tile's tokens are copied whole. TMA fills with zeros past the end; the interpreter does not.
    rows = max(M, config.max_tokens) if interpret is None else M + config.max_tokens
    if config.tokens_in_order:
        tokens = jnp.pad(lhs, ((0, rows - M), (0, 0)))
    else:
        tokens = permute_columns(lhs, weights, rows)
    partial_results = few_tokens_kernel.matmul(
        tokens,
        tuple(matrices),
        tuple(scales),
        group_sizes,
        M=M,
        weights=weights,
        config=config,
        thread_blocks=multiprocessors() if interpret is None else 2,
        interpret=interpret,
    )
    if len(partial_results) == 1:
        return partial_results[0]
    return jnp.sum(partial_results, axis=0).astype(lhs.dtype)


def weights_of(matrices: reference.Matrices, K: int, block_shape: tuple[int, int]) -> Weights:
    """Returns the layout of int8, int4 or float8_e4m3fn matrices with K columns.

    Raises:
      NotImplementedError: N, K or the scale blocks are not multiples of what :class:`Weights`
        requires.
    """
    return Weights.of(_FORMATS[jnp.dtype(matrices.dtype)], matrices.shape[1], K, block_shape)


def permute_columns(
    lhs: BFloat16[Array, "M K"], weights: Weights, rows: int
) -> BFloat16[Array, "blocks rows 64"]:
    """Permutes the columns of lhs to the order in which the kernel unpacks the weights' columns.

    A thread reads 16 bytes of a weight row and unpacks them in its registers. What it has then is
    an operand of a tensor core instruction only if the columns are permuted. Permuting the few
    tokens is far cheaper than permuting the weights.

    Returns:
      Blocks of 64 columns, with zeros from row M up to ``rows``.
    """
    M, K = lhs.shape
    if weights.bits == 8:
        # (thread, word, pair, half): a word's bytes are unpacked as 0, 2 and then 1, 3.
        x = lhs.reshape(M, K // 64, 4, 4, 2, 2).transpose(1, 0, 3, 5, 2, 4)
    else:
        # (thread, block, word, pair, slice, half): a word's half bytes as 0, 4; 1, 5; 2, 6; 3, 7.
        x = lhs.reshape(M, K // 128, 4, 2, 2, 2, 2, 2).transpose(1, 3, 0, 4, 6, 7, 2, 5)
    return jnp.pad(x.reshape(K // 64, M, 64), ((0, 0), (0, rows - M), (0, 0)))
