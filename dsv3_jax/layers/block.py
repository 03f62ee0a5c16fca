"""One decoder layer: norm, attention, add, norm, MLP or experts, add."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from dsv3_jax.config import ModelConfig
from dsv3_jax.layers import run_layer
from dsv3_jax.layers.attention import MultiHeadLatentAttention
from dsv3_jax.layers.linear import WeightArgs
from dsv3_jax.layers.mlp import MLP
from dsv3_jax.layers.moe import MoE, RoutingStats
from dsv3_jax.layers.norm import RMSNorm, norm_dtype
from dsv3_jax.layers.paged_cache import Form, LayerCache, LayerPages, join_tokens
from dsv3_jax.layers.rope import Rotation
from dsv3_jax.layers.sparse_attention import SparseAttention
from sharding import Layout


class DecoderLayer(nnx.Module):
    """``h = x + attention(norm(x))``, ``y = h + mlp(norm(h))``; residual sums in float32.

    ``mlp`` and the norms may be replaced by any module that maps [B, T, D] to [B, T, D]; see
    docs/change_the_model.md. Statistics are those of an MoE, and None for other layers.
    """

    def __init__(self, config: ModelConfig, *, dense: bool, **weights: Unpack[WeightArgs]):
        D, F, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        norms = norm_dtype(config, weights["dtype"])
        self.layout: Layout | None = None  # see DeepSeekV3.lay_out
        self.input_layernorm = RMSNorm(D, eps=eps, dtype=norms)
        attention = SparseAttention if config.has_indexer else MultiHeadLatentAttention
        self.self_attn = attention(config, **weights)
        self.post_attention_layernorm = RMSNorm(D, eps=eps, dtype=norms)
        self.mlp: Any  # an MLP, a MoE, or a module that replaces it
        if dense:
            self.mlp = MLP(D, F, std=config.initializer_range, **weights)
        else:
            self.mlp = MoE(config, **weights)

    def forward(
        self, x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], RoutingStats | None]:
        """Runs whole sequences on one device, without a cache."""
        normed = self.input_layernorm(x)  # [B, T, D]
        attended, _ = self.self_attn(normed, rotation)  # [B, T, D]
        return self.feed_forward(x, attended)

    def forward_cached(
        self,
        x: Float[Array, "_ _ D"],
        rotation: Rotation,
        caches: Sequence[LayerCache],
        forms: Sequence[Form],
    ) -> tuple[Float[Array, "_ _ D"], LayerPages, RoutingStats | None]:
        """Runs new tokens on one device, after the cached ones of their sequences. Tokens, caches
        and forms are those of :meth:`Attention.extend_batches`."""
        valid = join_tokens([cache.valid for cache in caches])  # [B, T], or [1, N] of all batches
        normed = self.input_layernorm(x)  # [B, T, D]
        attended, pages = self.self_attn.extend_batches(normed, rotation, caches, forms)
        y, stats = self.feed_forward(x, attended, valid)
        return y, pages, stats

    def feed_forward(
        self,
        x: Float[Array, "B T D"],
        attended: Float[Array, "B T D"],
        valid: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], RoutingStats | None]:
        """Adds attention's output to ``x``, and the MLP's or the experts' output to that sum.
        Padding, where ``valid`` is False, goes to no expert."""
        norm: Callable[..., Array] = self.post_attention_layernorm
        if isinstance(norm, RMSNorm):
            h, normed = norm.add_and_norm(x, attended)  # [B, T, D] each
        else:  # replaced
            h = add(x, attended)
            normed = norm(h)
        if isinstance(self.mlp, MoE):
            out, stats = self.mlp(normed, valid)  # [B, T, D]
        else:
            out, stats = self.mlp(normed), None
        return add(h, out), stats

    def __call__(
        self, x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], RoutingStats | None]:
        """Does :meth:`forward` on the devices of the layout."""
        return run_layer.forward(self, DecoderLayer.forward, x, rotation)

    def extend_batches(
        self,
        xs: Sequence[Float[Array, "_ _ D"]],
        rotations: Sequence[Rotation],
        caches: Sequence[LayerCache],
        forms: Sequence[Form],
        run: run_layer.ForwardCached | None = None,
    ) -> tuple[list[Float[Array, "_ _ D"]], LayerPages, RoutingStats | None]:
        """Does :meth:`forward_cached`, or ``run`` in its place, on the devices of the layout.
        Returns the output of each batch, the page arrays with the new tokens, and the statistics of
        all tokens."""
        run = run or DecoderLayer.forward_cached
        return run_layer.forward_cached(self, run, xs, rotations, caches, forms)

    def extend(
        self,
        x: Float[Array, "B T D"],
        rotation: Rotation,
        cache: LayerCache,
        form: Form,
        run: run_layer.ForwardCached | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerPages, RoutingStats | None]:
        """Does :meth:`extend_batches` for one batch."""
        (y,), pages, stats = self.extend_batches([x], [rotation], [cache], [form], run)
        return y, pages, stats


def add(x: Float[Array, "B T D"], y: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Returns ``x + y``, summed in float32 and rounded to x's dtype."""
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)


LayerRunner = Callable[[Sequence[DecoderLayer], Array, Rotation], tuple[Array, list[RoutingStats]]]
"""Runs layers in order on ``x`` [B, T, D]. Returns the result, and statistics per MoE layer."""


def run_in_order(
    layers: Sequence[DecoderLayer], x: Float[Array, "B T D"], rotation: Rotation
) -> tuple[Float[Array, "B T D"], list[RoutingStats]]:
    """Runs layers in order, unrolled: the default :data:`LayerRunner`."""
    stats = []
    for layer in layers:
        x, layer_stats = layer(x, rotation)
        if layer_stats is not None:
            stats.append(layer_stats)
    return x, stats
