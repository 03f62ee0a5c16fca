"""Reference implementation of whole_layer: the three operations that it replaces."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.attention_inputs import reference as before_attention
from pallas_kernels.attention_inputs.reference import AttentionWeights
from pallas_kernels.decoder_layer import reference as after_attention
from pallas_kernels.decoder_layer.reference import Chosen, Matrices, Projection, Router
from pallas_kernels.mla_decode import reference as attention
from pallas_kernels.route.reference import Rule


class LayerWeights(NamedTuple):
    """The weights that are used after attention itself, see :func:`pallas_kernels.feed_forward`."""

    w_uv: Float[Array, "H V C"]
    o_proj: Projection
    norm: Float[Array, " D"]
    router: Router | None
    shared: Matrices | None
    routed: Matrices | None


class Cached(NamedTuple):
    """One sequence's part of a layer's cache."""

    pages: Float[Array, "P page width"]
    slots: Int[Array, " T"]
    """Slots of the new tokens: ``page number * page + slot``."""
    table: Int[Array, " max_pages"]
    """The sequence's pages."""
    start: Int[Array, 1]
    """Number of tokens that were cached before."""


class LayerOutput(NamedTuple):
    out: Float[Array, "T D"]
    chosen: Chosen | None
    """The routing of an MoE layer."""
    pages: Float[Array, "P page width"]
    """The pages with the new tokens."""


def whole_layer(
    x: Float[Array, "T D"],
    before: AttentionWeights,
    after: LayerWeights,
    cos: Float32[Array, "T half"],
    sin: Float32[Array, "T half"],
    cached: Cached,
    *,
    scale: float,
    eps: float,
    latent_eps: float,
    after_eps: float,
    rule: Rule | None,
    counter: Any = None,
) -> LayerOutput:
    """Implements :func:`pallas_kernels.whole_layer.api.whole_layer`."""
    del counter
    pages, slots, table, start = cached
    q_latent, q_rope, pages = before_attention.attention_inputs(
        x, before, cos, sin, pages, slots, eps=eps, latent_eps=latent_eps
    )
    lengths = start + len(x)
    arrays = q_latent[None], q_rope[None], pages, table[None], lengths
    attended: jax.Array = attention.mla_decode(*arrays, scale=scale)[0][0]
    out, chosen = after_attention.feed_forward(
        x, after.norm, after.router, after.shared, after.routed,
        rule=rule, eps=after_eps, o_proj=after.o_proj, w_uv=after.w_uv,
        attended=attended.reshape(len(x), -1),
    )  # fmt: skip
    return LayerOutput(out, chosen, pages)
