"""Ragged matmul: the experts' product."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.grouped_matmul import blocked, cpu, mosaic_gpu, mosaic_tpu, reference

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.grouped_matmul,
    "mosaic_tpu": mosaic_tpu.grouped_matmul,
    "cpu": cpu.grouped_matmul,
    "blocked": blocked.grouped_matmul,
    "reference": reference.grouped_matmul,
}


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: reference.Matrices,
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None = None,
    rhs_scale: Float32[Array, "G Nb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
    implementation: Implementation = None,
) -> Float[Array, "M N"]:
    """``out[m] = rhs[g(m)] @ lhs[m]``, where g(m) is the group that row m falls into.

    Args:
      lhs: rows sorted by group. float8_e4m3fn with ``lhs_scale``, else bfloat16 or float32.
      rhs: one matrix a group, K-major, as DeepSeek stores its weights: float, int8, or int4 as
        uint8 [G, N, K / 2], packed as by :func:`pallas_kernels.integer_quant`.
      group_sizes: rows a group, in order, summing to at most M; rows past the sum are undefined.
      lhs_scale: for float8 rows, one scale a row and ``block_shape[1]`` of K; multiplied.
      rhs_scale: for float8 and integer matrices, one scale a block of ``block_shape``, ceil at
        the edges; multiplied.
      block_shape: (rows of N, columns of K) under one scale.

    Returns:
      [M, N] in lhs's dtype, bfloat16 for float8 rows. Sums are float32.

    Raises:
      ValueError: float8 or integers without their scale, the shape of a scale, another K in rhs,
        or an unknown ``implementation``.
      NotImplementedError: the named back-end does not take these arguments.
    """
    reference.check_scales(lhs, rhs, lhs_scale, rhs_scale, block_shape)
    return dispatch(
        "grouped_matmul",
        BACKENDS,
        implementation,
        lhs,
        rhs,
        group_sizes,
        lhs_scale,
        rhs_scale,
        block_shape=block_shape,
    )
