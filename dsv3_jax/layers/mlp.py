"""The gated feed-forward network."""

from __future__ import annotations

import math
from typing import Unpack

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv3_jax.layers.linear import Linear, WeightArgs
from dsv3_jax.layers.on_mesh import sharded_linear
from pallas_kernels import swiglu
from pallas_kernels.grouped_swiglu.reference import silu_multiply
from sharding import Layout


class MLP(nnx.Module):
    """``down(silu(gate x) * up x)``; silu and the elementwise product are in float32."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        std: float,
        hidden_axis: str = "ffn",
        **weights: Unpack[WeightArgs],
    ):
        self.layout: Layout | None = None  # see DeepSeekV3.lay_out
        self.hidden_axis = hidden_axis  # logical axis of the hidden width
        self.gate_proj = Linear(width, hidden, std=std, **weights)
        self.up_proj = Linear(width, hidden, std=std, **weights)
        self.down_proj = Linear(hidden, width, std=std, **weights)

    def __call__(
        self, x: Float[Array, "*batch D"], out_dtype: DTypeLike | None = None
    ) -> Float[Array, "*batch D"]:
        """Returns the output, reduced over the devices that share the hidden width."""
        return sharded_linear(
            self.down_proj, self._hidden(x), self.layout, self.hidden_axis, out_dtype
        )

    def _hidden(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch F"]:
        gate, up = self.gate_proj, self.up_proj
        if type(gate) is not Linear or type(up) is not Linear:  # replaced
            return silu_and_multiply(gate(x), up(x))
        if gate.uses_float8_activations(math.prod(x.shape[:-1])):
            return silu_and_multiply(gate(x), up(x))
        if gate.quantization is None:
            return swiglu(x, gate.dense(x.dtype), up.dense(x.dtype))
        weights, scales = (gate.weight[...], up.weight[...]), (gate.scale, up.scale)
        return swiglu(x, *weights, *scales, block_shape=gate.block_shape)


def silu_and_multiply(
    gate: Float[Array, "*batch F"], up: Float[Array, "*batch F"]
) -> Float[Array, "*batch F"]:
    """Returns ``silu(gate) * up``, computed in float32 and rounded to the dtype of ``gate``."""
    return silu_multiply(gate, up).astype(gate.dtype)
