"""The specification of grouped_swiglu: two grouped products, joined in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.block_quant.reference import block_quant
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.reference import Matrices

# Rows in lhs's dtype, or float8 and scales of 128 columns.
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
    if quantize:
        lhs, gate, up, lhs_scale, gate_scale, up_scale = without_gradient(
            (lhs, gate, up, lhs_scale, gate_scale, up_scale)
        )
    gated, upward = (
        grouped_matmul(lhs, matrices, group_sizes, lhs_scale, scale, block_shape=block_shape)
        for matrices, scale in ((gate, gate_scale), (up, up_scale))
    )
    joined = join(gated, upward)
    return block_quant(joined) if quantize else joined.astype(gated.dtype)


def join(
    gated: Float[Array, "*batch F"], upward: Float[Array, "*batch F"]
) -> Float32[Array, "*batch F"]:
    return jax.nn.silu(gated.astype(jnp.float32)) * upward.astype(jnp.float32)


@jax.custom_vjp
def without_gradient(arrays: Any) -> Any:
    """The arrays themselves; raises TypeError where a gradient of them is asked for."""
    return arrays


def _refuse(*_: Any) -> Any:
    raise TypeError(
        "grouped_swiglu: a quantized result has no gradient; call it with quantize=False, or with"
        " jax.lax.stop_gradient of its arguments"
    )


without_gradient.defvjp(_refuse, _refuse)
