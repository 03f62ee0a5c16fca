"""SwiGLU of rows times two quantized matrices."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.quantized_matmul.reference import Matrix, check_shapes
from pallas_kernels.quantized_swiglu import mosaic_gpu, reference

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.quantized_swiglu,
    "reference": reference.quantized_swiglu,
}


def quantized_swiglu(
    x: Float[Array, "*batch K"],
    gate: Matrix,
    up: Matrix,
    gate_scale: Float32[Array, "Fb Kb"],
    up_scale: Float32[Array, "Fb Kb"],
    *,
    block_shape: tuple[int, int],
    implementation: Implementation = None,
) -> Float[Array, "*batch F"]:
    """``silu(gate @ x) * (up @ x)`` for every row x, where silu(x) = x / (1 + exp(-x)).

    Args:
      x: bfloat16 or float32.
      gate, up: alike in shape and dtype, as :func:`pallas_kernels.quantized_matmul` takes them.
      gate_scale, up_scale: one a block of ``block_shape``.

    Returns:
      [..., F] in x's dtype. Both products are rounded to x's dtype; silu and the last product are
      float32.

    Raises:
      ValueError: gate and up differ in shape or dtype, or what quantized_matmul raises it for.
      NotImplementedError: the named back-end does not take these arguments.
    """
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise ValueError(
            f"up: expected {gate.dtype} {gate.shape} as gate is, got {up.dtype} {up.shape}"
        )
    for matrix, scale in ((gate, gate_scale), (up, up_scale)):
        check_shapes(x, matrix, scale, block_shape)
    arrays = x, gate, up, gate_scale, up_scale
    return dispatch("quantized_swiglu", BACKENDS, implementation, *arrays, block_shape=block_shape)
