"""The public swiglu: the gate and up matmuls of a feed-forward network, and SwiGLU."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.quantized_matmul.reference import Matrix, check_shapes
from pallas_kernels.swiglu import gpu, reference

BACKENDS = {
    "mosaic_gpu": gpu.one_kernel,
    "separate": gpu.two_matmuls,
    "reference": reference.swiglu,
}


def swiglu(
    x: Float[Array, "*batch K"],
    gate: Matrix,
    up: Matrix,
    gate_scale: Float32[Array, "Fb Kb"] | None = None,
    up_scale: Float32[Array, "Fb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
    implementation: Implementation = None,
) -> Float[Array, "*batch F"]:
    """Computes ``silu(gate @ x) * (up @ x)`` for every row x, where silu(x) = x / (1 + exp(-x)).

    Args:
      x: bfloat16 or float32.
      gate: matrix [F, K] in x's dtype, or quantized as for :func:`pallas_kernels.quantized_matmul`.
      up: matrix of the same shape and dtype.
      gate_scale: scales of a quantized ``gate``, one per block of ``block_shape``.
      up_scale: scales of a quantized ``up``.
      block_shape: (rows of F, columns of K) that share a scale.

    Returns:
      [..., F] in x's dtype. silu and the multiplication by up are float32. The results of both
      matmuls may be rounded to x's dtype before.

    Raises:
      ValueError: gate and up differ in shape or dtype, only one has a scale, they have none and
        their dtype is not x's, or quantized_matmul would raise it.
      NotImplementedError: the named back-end does not support these arguments.
    """
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(
            f"up: expected {gate.dtype} {gate.shape} as gate is, got {up.dtype} {up.shape}"
        )
    if gate_scale is None and up_scale is None:
        if gate.dtype != x.dtype or gate.shape[1] != x.shape[-1]:
            raise ValueError(
                f"gate: expected {x.shape[-1]} columns of {x.dtype} as x has, or scales, got"
                f" {gate.shape[1]} of {gate.dtype}"
            )
    elif gate_scale is None or up_scale is None:
        raise ValueError("expected a scale for both matrices or for none, got one")
    else:
        for matrix, scale in ((gate, gate_scale), (up, up_scale)):
            check_shapes(x, matrix, scale, block_shape)
    arrays = x, gate, up, gate_scale, up_scale
    return dispatch("swiglu", BACKENDS, implementation, *arrays, block_shape=block_shape)
