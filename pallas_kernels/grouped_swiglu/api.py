"""The public grouped_swiglu: the gate and up matmuls of MoE experts, and SwiGLU."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.grouped_matmul.reference import Matrices, check_scales
from pallas_kernels.grouped_swiglu import mosaic_gpu, reference

BACKENDS = {"mosaic_gpu": mosaic_gpu.grouped_swiglu, "reference": reference.grouped_swiglu}


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
    implementation: Implementation = None,
) -> Float[Array, "M F"]:
    """Computes ``out[m] = silu(gate[g(m)] @ lhs[m]) * (up[g(m)] @ lhs[m])``.

    g(m) is the group of row m, and silu(x) = x / (1 + exp(-x)).

    Args:
      gate: one matrix per group, as ``rhs`` of :func:`pallas_kernels.grouped_matmul`, which also
        describes the arguments that are not listed here.
      up: as ``gate``, of the same shape and dtype.
      gate_scale: as its ``rhs_scale``.
      up_scale: as its ``rhs_scale``.

    Returns:
      [M, F] in lhs's dtype, or bfloat16 for float8 rows. Rows past the groups' sum are undefined.
      Sums, silu and the multiplication by up are float32. A back-end may round both sums to the
      result's dtype before silu.

    Raises:
      ValueError: gate and up differ in shape or dtype, or grouped_matmul would raise it.
      NotImplementedError: the named back-end does not support these arguments.
    """
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(
            f"up: expected {gate.dtype} {gate.shape} as gate is, got {up.dtype} {up.shape}"
        )
    for matrices, scale in ((gate, gate_scale), (up, up_scale)):
        check_scales(lhs, matrices, lhs_scale, scale, block_shape)
    arrays = lhs, gate, up, group_sizes, lhs_scale, gate_scale, up_scale
    return dispatch("grouped_swiglu", BACKENDS, implementation, *arrays, block_shape=block_shape)
