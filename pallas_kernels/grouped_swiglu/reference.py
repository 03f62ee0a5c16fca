"""The specification of grouped_swiglu: two grouped matmuls, and SwiGLU in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.block_quant.reference import block_quant
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.reference import Matrices

# In lhs's dtype, or float8 values and their scales, one per row and 128 columns.
Result = Float[Array, "M F"] | tuple[Float[Array, "M F"], Float32[Array, "M Fs"]]


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
) -> Result:
    """As :func:`pallas_kernels.grouped_swiglu`."""
    if quantize:
        lhs, gate, up, lhs_scale, gate_scale, up_scale = without_gradient(
            (lhs, gate, up, lhs_scale, gate_scale, up_scale)
        )
    gate_out, up_out = (
        grouped_matmul(lhs, matrices, group_sizes, lhs_scale, scale, block_shape=block_shape)
        for matrices, scale in ((gate, gate_scale), (up, up_scale))
    )
    out = silu_multiply(gate_out, up_out)
    return block_quant(out) if quantize else out.astype(gate_out.dtype)


def silu_multiply(
    gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]
) -> Float32[Array, "*batch F"]:
    """Returns ``silu(gate) * up`` in float32."""
    return jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)


@jax.custom_vjp
def without_gradient(arrays: Any) -> Any:
    """Returns the arrays unchanged. Differentiating through it raises TypeError."""
    return arrays


def _refuse(*_: Any) -> Any:
    raise TypeError(
        "grouped_swiglu: a quantized result has no gradient; call it with quantize=False, or with"
        " jax.lax.stop_gradient of its arguments"
    )


without_gradient.defvjp(_refuse, _refuse)
