"""The public grouped_matmul: the matmul of MoE experts, with rows sorted by expert."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.grouped_matmul import batched, cpu, mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.residuals import named

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.grouped_matmul,
    "mosaic_tpu": mosaic_tpu.grouped_matmul,
    "cpu": cpu.grouped_matmul,
    "batched": batched.grouped_matmul,
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
    """Computes ``out[m] = rhs[g(m)] @ lhs[m]``, where g(m) is the group of row m.

    Args:
      lhs: rows sorted by group. float8_e4m3fn with ``lhs_scale``, otherwise bfloat16 or float32.
      rhs: one matrix per group, K-major, as DeepSeek stores its weights. Float, int8, or int4 as
        uint8 [G, N, K / 2], packed as by :func:`pallas_kernels.integer_quant`.
      group_sizes: number of rows of each group, in order, with a sum of at most M. Rows of the
        result past the sum are undefined.
      lhs_scale: for float8 rows, one scale per row and ``block_shape[1]`` columns, which multiplies
        the values.
      rhs_scale: for float8 and integer matrices, one scale per block of ``block_shape``, which
        multiplies the values. The last blocks along N and K may be partial.
      block_shape: (rows of N, columns of K) that share a scale.

    Returns:
      [M, N] in lhs's dtype, or bfloat16 for float8 rows. Sums are float32.

    Raises:
      ValueError: float8 or integers without their scale, a scale of another shape, another K in
        rhs, or an unknown ``implementation``.
      NotImplementedError: the named back-end does not support these arguments.
    """
    reference.check_scales(lhs, rhs, lhs_scale, rhs_scale, block_shape)
    arrays = lhs, rhs, group_sizes, lhs_scale, rhs_scale
    out = dispatch("grouped_matmul", BACKENDS, implementation, *arrays, block_shape=block_shape)
    return named("matmul", out)
