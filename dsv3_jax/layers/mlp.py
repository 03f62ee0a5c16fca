"""The gated feed-forward network."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv3_jax.config import Quantization
from dsv3_jax.layers.linear import Linear


class MLP(nnx.Module):
    """``down(silu(gate x) * up x)``; the product of the two is taken in float32."""

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        std: float,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        quantization: Quantization | None,
    ):
        kwargs = {"std": std, "rngs": rngs, "dtype": dtype, "quantization": quantization}
        self.gate_proj = Linear(width, inner, **kwargs)
        self.up_proj = Linear(width, inner, **kwargs)
        self.down_proj = Linear(inner, width, **kwargs)

    def __call__(
        self, x: Float[Array, "*batch D"], out_dtype: DTypeLike | None = None
    ) -> Float[Array, "*batch D"]:
        hidden = silu_and_multiply(self.gate_proj(x), self.up_proj(x))
        return self.down_proj(hidden, out_dtype)


def silu_and_multiply(
    gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]
) -> Float[Array, "*batch F"]:
    f32 = jnp.float32
    return (jax.nn.silu(gate.astype(f32)) * up.astype(f32)).astype(gate.dtype)
