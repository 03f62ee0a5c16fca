"""The specification of swiglu: two matmuls, and SwiGLU in float32."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32

from pallas_kernels.grouped_swiglu.reference import silu_multiply
from pallas_kernels.matmul import matmul as dense_matmul
from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.reference import Matrix


def swiglu(
    x: Float[Array, "*batch K"],
    gate: Matrix,
    up: Matrix,
    gate_scale: Float32[Array, "Fb Kb"] | None = None,
    up_scale: Float32[Array, "Fb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
) -> Float[Array, "*batch F"]:
    """As :func:`pallas_kernels.swiglu`."""

    def matmul(matrix: Matrix, scale: Float32[Array, "Fb Kb"] | None) -> Float[Array, "*batch F"]:
        if scale is not None:
            return quantized_matmul(x, matrix, scale, block_shape=block_shape)
        return dense_matmul(x, matrix, x.dtype)

    return silu_multiply(matmul(gate, gate_scale), matmul(up, up_scale)).astype(x.dtype)
