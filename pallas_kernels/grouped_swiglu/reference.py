"""The specification of grouped_swiglu: two grouped matmuls, and SwiGLU in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.reference import Matrices


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
) -> Float[Array, "M F"]:
    """As :func:`pallas_kernels.grouped_swiglu`."""
    gate_out, up_out = (
        grouped_matmul(lhs, matrices, group_sizes, lhs_scale, scale, block_shape=block_shape)
        for matrices, scale in ((gate, gate_scale), (up, up_scale))
    )
    return silu_multiply(gate_out, up_out).astype(gate_out.dtype)


@jax.custom_vjp
def silu_multiply(
    gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]
) -> Float32[Array, "*batch F"]:
    """Returns ``silu(gate) * up`` in float32. The gradient keeps its arguments as they are; JAX's
    would keep float32 intermediates."""
    return jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)


def _backward(
    arguments: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    gate, up = arguments
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    s = jax.nn.sigmoid(g)
    d_gate, d_up = cotangent * u * s * (1 + g * (1 - s)), cotangent * g * s
    return d_gate.astype(gate.dtype), d_up.astype(up.dtype)


silu_multiply.defvjp(lambda gate, up: (silu_multiply(gate, up), (gate, up)), _backward)
