"""The experts' gate and up products and the SwiGLU that joins them."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.grouped_matmul.reference import Matrices, check_scales
from pallas_kernels.grouped_swiglu import mosaic_gpu, reference

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.grouped_swiglu,
    "reference": reference.grouped_swiglu,
}


def grouped_swiglu(
    lhs: Float[Array, "M K"],
    gate: Matrices,
    up: Matrices,
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None = None,
    gate_scale: Float32[Array, "G Fb Kb"] | None = None,
    up_scale: Float32[Array, "G Fb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
    quantize: bool = False,
    implementation: Implementation = None,
) -> reference.Result:
    """``out[m] = silu(gate[g(m)] @ lhs[m]) * (up[g(m)] @ lhs[m])``, where g(m) is the group that
    row m falls into and silu(x) = x / (1 + exp(-x)).

    Args:
      lhs, lhs_scale, group_sizes, block_shape: as :func:`pallas_kernels.grouped_matmul` takes them.
      gate, up: one matrix a group each, alike in shape and dtype; as its ``rhs``.
      gate_scale, up_scale: as its ``rhs_scale``.
      quantize: return the result as the next product's rows, in float8 by blocks of (1, 128).

    Returns:
      [M, F] in lhs's dtype, bfloat16 for float8 rows; rows past the groups' sum are undefined.
      Sums, silu and the last product are float32; a back-end may round both sums to the result's
      dtype before.
      With ``quantize``: values float8_e4m3fn [M, F] and scale float32 [M, ceil(F / 128)], which are
      :func:`pallas_kernels.block_quant` of the float32 result; a back-end may round that to
      bfloat16 before. They have no gradient.

    Raises:
      TypeError: a gradient through a quantized result.
      ValueError: gate and up differ in shape or dtype, or what grouped_matmul raises it for.
      NotImplementedError: the named back-end does not take these arguments.
    """
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(
            f"up: expected {gate.dtype} {gate.shape} as gate is, got {up.dtype} {up.shape}"
        )
    for matrices, scale in ((gate, gate_scale), (up, up_scale)):
        check_scales(lhs, matrices, lhs_scale, scale, block_shape)
    return dispatch(
        "grouped_swiglu",
        BACKENDS,
        implementation,
        lhs,
        gate,
        up,
        group_sizes,
        lhs_scale,
        gate_scale,
        up_scale,
        block_shape=block_shape,
        quantize=quantize,
    )
