"""One decoder layer, and the multi-token prediction layer built on it."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from dsv3_jax.config import ModelConfig, Quantization
from dsv3_jax.layers.attention import Form, LayerCache, MultiHeadLatentAttention
from dsv3_jax.layers.linear import Linear
from dsv3_jax.layers.mlp import MLP
from dsv3_jax.layers.moe import MoE, RoutingStats
from dsv3_jax.layers.norm import RMSNorm
from dsv3_jax.layers.rope import Rotation


class DecoderLayer(nnx.Module):
    """``h = x + attention(norm(x))``, ``y = h + mlp(norm(h))``; residual sums in float32."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dense: bool,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        quantization: Quantization | None,
    ):
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(D, eps=eps, dtype=dtype)
        self.self_attn = MultiHeadLatentAttention(
            config, rngs=rngs, dtype=dtype, quantization=quantization
        )
        self.post_attention_layernorm = RMSNorm(D, eps=eps, dtype=dtype)
        if dense:
            self.mlp = MLP(
                D,
                config.intermediate_size,
                std=config.initializer_range,
                rngs=rngs,
                dtype=dtype,
                quantization=quantization,
            )
        else:
            self.mlp = MoE(config, rngs=rngs, dtype=dtype, quantization=quantization)

    def __call__(
        self, x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], RoutingStats | None]:
        """Whole sequences, no cache."""
        attended, _ = self.self_attn(self.input_layernorm(x), rotation)
        return self._feed_forward(x, attended, None)

    def extend(
        self, x: Float[Array, "B T D"], rotation: Rotation, cache: LayerCache, form: Form
    ) -> tuple[Float[Array, "B T D"], Float[Array, "P page CR"], RoutingStats | None]:
        """T new tokens a row behind those in the cache; also the extended cache."""
        attended, pages = self.self_attn.extend(self.input_layernorm(x), rotation, cache, form)
        y, stats = self._feed_forward(x, attended, cache.valid)
        return y, pages, stats

    def _feed_forward(
        self,
        x: Float[Array, "B T D"],
        attended: Float[Array, "B T D"],
        valid: Bool[Array, "B T"] | None,
    ) -> tuple[Float[Array, "B T D"], RoutingStats | None]:
        h, normed = self.post_attention_layernorm.of_sum(x, attended)
        if isinstance(self.mlp, MLP):
            return _add(h, self.mlp(normed)), None
        out, stats = self.mlp(normed, valid)
        return _add(h, out), stats


class SharedHead(nnx.Module):
    """The norm before the LM head, which the MTP layer does not share with the model."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike):
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)


class MTPLayer(DecoderLayer):
    """Multi-token prediction: from ``h_i`` and token i+1, the hidden state that predicts i+2.

    ``y_i = layer(eh_proj [enorm(embedding of token i+1) | hnorm(h_i)])`` (V3 report, equation 21;
    the checkpoint's order, embedding first). Embedding and LM head are the model's own.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        quantization: Quantization | None,
    ):
        super().__init__(config, dense=False, rngs=rngs, dtype=dtype, quantization=quantization)
        D, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(D, eps=eps, dtype=dtype)
        self.hnorm = RMSNorm(D, eps=eps, dtype=dtype)
        self.eh_proj = Linear(2 * D, D, std=config.initializer_range, rngs=rngs, dtype=dtype)
        self.shared_head = SharedHead(config, dtype=dtype)

    def join(
        self, hidden: Float[Array, "B T D"], next_embedding: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """The layer's input, from the hidden state of token i and the embedding of token i+1."""
        return self.eh_proj(
            jnp.concatenate([self.enorm(next_embedding), self.hnorm(hidden)], axis=-1)
        )


def _add(x: Float[Array, "B T D"], y: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
