"""The specification of quantized_swiglu: two quantized products, joined in float32."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32

from pallas_kernels.grouped_swiglu.reference import join
from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.reference import Matrix


def quantized_swiglu(
    x: Float[Array, "*batch K"],
    gate: Matrix,
    up: Matrix,
    gate_scale: Float32[Array, "Fb Kb"],
    up_scale: Float32[Array, "Fb Kb"],
    *,
    block_shape: tuple[int, int],
) -> Float[Array, "*batch F"]:
    gated, upward = (
        quantized_matmul(x, matrix, scale, block_shape=block_shape)
        for matrix, scale in ((gate, gate_scale), (up, up_scale))
    )
    return join(gated, upward).astype(x.dtype)
