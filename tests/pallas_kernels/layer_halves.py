"""The second half of decoder layers as programs: the model's own operations, and in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dsv3_jax.overrides.few_tokens import arguments, projection
from pallas_kernels.decoder_layer import reference
from pallas_kernels.hopper.grid_barrier import new_counter
from pallas_kernels.rms_norm.reference import rms_norm

Half = Callable[[Float[Array, "M D"], Float[Array, "M HV"] | None, Any, Any], Float[Array, "M D"]]
"""The second half of a layer: function of the residual, attention's output before its projection or
None, the layer's state, and a Ref."""


def plain(graph: Any) -> Half:
    """Returns the model's own operations."""

    def half(h: Any, heads: Any, state: Any, counter: Any) -> Float[Array, "M D"]:
        del counter
        layer = nnx.merge(graph, state)
        if heads is None:
            normed = layer.post_attention_layernorm(h)
        else:
            attended = layer.self_attn.o_proj(heads)
            h, normed = layer.post_attention_layernorm.add_and_norm(h, attended)
        out = layer.mlp(normed[None], None)[0][0]
        return (h.astype(jnp.float32) + out.astype(jnp.float32)).astype(h.dtype)

    return half


def exact(graph: Any) -> Half:
    """Returns the reference with float32 activations.

    Only the normed tokens are rounded to h's dtype, because other inputs might change the choice of
    experts.
    """

    def half(h: Any, heads: Any, state: Any, counter: Any) -> Float[Array, "M D"]:
        del counter
        layer = nnx.merge(graph, state)
        arrays, options = arguments(layer)
        with jax.default_matmul_precision("highest"):
            if heads is not None:
                h = reference.add_attended(h, heads, projection(layer.self_attn.o_proj))
            x, router = rms_norm(h, arrays["norm"], eps=options["eps"]), arrays["router"]
            chosen = None if router is None else reference.choose(x, router, options["rule"])
            x = x.astype(jnp.float32)
            return h + reference.mix(x, chosen, arrays["shared"], arrays["routed"])

    return half


def chain(
    half: Half, laps: int
) -> Callable[[Float[Array, "M D"], Float[Array, "M HV"] | None, Sequence[Any]], Any]:
    """Returns a program that runs layers one after the other, ``laps`` times."""

    def run(h: Any, heads: Any, states: Sequence[Any]) -> Float[Array, "M D"]:
        counter, x = jax.new_ref(new_counter()), h
        for state in [*states] * laps:
            x = half(x, heads, state, counter)
        return x

    return run
