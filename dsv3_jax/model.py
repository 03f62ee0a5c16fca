"""The whole network: embedding, decoder layers, LM head, and the MTP layers behind them."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from dsv3_jax.config import BlockQuantization, ModelConfig
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.layers.attention import Form, LayerCache
from dsv3_jax.layers.block import DecoderLayer, MTPLayer
from dsv3_jax.layers.linear import Embedding, Linear
from dsv3_jax.layers.moe import RoutingStats
from dsv3_jax.layers.norm import RMSNorm
from dsv3_jax.layers.rope import rotation

MTPHidden = Literal["post_norm", "pre_norm"]


class Aux(NamedTuple):
    """What a forward pass computes beside its logits."""

    routing_counts: Int[Array, "L_moe E"]
    """Tokens that chose each expert, in each MoE layer of the main model."""
    mtp_logits: tuple[Float32[Array, "B T_k W"], ...]
    """One an MTP layer: entry k is [B, T-1-k, W], and position i predicts token i+2+k."""
    routing: tuple[RoutingStats, ...]
    """Each MoE layer's counts and scores: the main model's layers, then the MTP layers."""


class DeepSeekV3(nnx.Module):
    """A model of the DeepSeek-V2/V3 family.

    Modules carry the checkpoint's names; ``mtp[k]`` is its layer ``num_hidden_layers + k``.

    Args:
      config: the shape. Models with a sparse-attention indexer (V3.2) are refused.
      rngs: source of the random initial weights, normal with ``initializer_range``.
      dtype: of weights and activations. Router, norms, softmax, residual sums and expert sums are
        float32 whatever it is.
      quantization: keeps the projections in float8 with block scales, as published.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        quantization: BlockQuantization | None = None,
    ):
        if config.has_indexer:
            raise ValueError(
                f"model_type {config.model_type} attends through a sparse indexer, which this "
                "model does not build; expected a model without index_topk"
            )
        self.config = config
        self.dtype = jnp.dtype(dtype)
        kwargs = {"rngs": rngs, "dtype": dtype, "quantization": quantization}
        W, D, std = config.vocab_size, config.hidden_size, config.initializer_range
        self.embed_tokens = Embedding(W, D, std=std, rngs=rngs, dtype=dtype)
        self.layers = nnx.List(
            DecoderLayer(config, dense=i < config.first_k_dense_replace, **kwargs)
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(D, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = Linear(D, W, std=std, rngs=rngs, dtype=dtype)
        self.mtp = nnx.List(
            MTPLayer(config, **kwargs) for _ in range(config.num_nextn_predict_layers)
        )

    @overload
    def __call__(
        self, tokens: Int[Array, "B T"], *, return_aux: Literal[False] = False
    ) -> Float32[Array, "B T W"]: ...
    @overload
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        return_aux: Literal[True],
        mtp_hidden: MTPHidden = "post_norm",
    ) -> tuple[Float32[Array, "B T W"], Aux]: ...

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        return_aux: bool = False,
        mtp_hidden: MTPHidden = "post_norm",
    ) -> Float32[Array, "B T W"] | tuple[Float32[Array, "B T W"], Aux]:
        """Logits of whole sequences, without a cache.

        Args:
          return_aux: also run the MTP layers and return :class:`Aux`.
          mtp_hidden: which hidden state feeds an MTP layer: after the final norm (as serving
            engines do) or before it. The paper leaves it open.
        """
        x = self.embed_tokens(tokens)
        turn = rotation(self.config, _positions(tokens))
        stats: list[RoutingStats] = []
        for layer in self.layers:
            x, layer_stats = layer(x, turn)
            if layer_stats is not None:
                stats.append(layer_stats)
        hidden = self.norm(x)
        logits = self.logits(hidden)
        if not return_aux:
            return logits
        counts = [s.counts for s in stats]
        mtp_logits = []
        feed = hidden if mtp_hidden == "post_norm" else x
        for k, layer in enumerate(self.mtp):
            upcoming = tokens[:, k + 1 :]
            joined = layer.join(feed[:, : upcoming.shape[1]], self.embed_tokens(upcoming))
            y, layer_stats = layer(joined, rotation(self.config, _positions(upcoming)))
            assert layer_stats is not None
            stats.append(layer_stats)
            normed = layer.shared_head.norm(y)
            mtp_logits.append(self.logits(normed))
            feed = normed if mtp_hidden == "post_norm" else y
        E = self.config.n_routed_experts
        stacked = jnp.stack(counts) if counts else jnp.zeros((0, E), jnp.int32)
        return logits, Aux(stacked, tuple(mtp_logits), tuple(stats))

    def extend(
        self,
        tokens: Int[Array, "B T"],
        counts: Int[Array, " B"],
        cache: LatentKVCache,
        form: Form,
    ) -> tuple[Float[Array, "B T D"], LatentKVCache]:
        """Runs ``counts`` new tokens a row behind those in the cache, and caches them.

        Args:
          tokens: padded at the right; only the first ``counts[b]`` of row b are tokens.
          form: ``expanded`` for prefill, ``absorbed`` for decode; the results are equal.

        Returns:
          Hidden states after the final norm, undefined where padded, and the extended cache. The
          caller sees to it that the cache has room.
        """
        T = tokens.shape[1]
        valid = jnp.arange(T) < counts[:, None]
        turn = rotation(self.config, cache.lengths[:, None] + _positions(tokens))
        x = self.embed_tokens(tokens)
        new_pages = []
        for layer, pages in zip(self.layers, cache.pages, strict=True):
            layer_cache = LayerCache(pages, cache.block_tables, cache.lengths, valid)
            x, pages, _ = layer.extend(x, turn, layer_cache, form)
            new_pages.append(pages)
        cache = dataclasses.replace(
            cache, pages=tuple(new_pages), lengths=cache.lengths + counts.astype(jnp.int32)
        )
        return self.norm(x), cache

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float32[Array, "*batch W"]:
        """The LM head, on hidden states after the final norm."""
        return self.lm_head(hidden, jnp.float32)


def _positions(tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)


class _SameKey(nnx.Rngs):
    """The same key at every draw, for models of which only the shapes are wanted.

    With jax 0.10, counting draws inside a trace takes time quadratic in the trace's length: a
    minute for DeepSeek-V3 in float8, against two seconds this way.
    """

    def params(self) -> jax.Array:
        return jax.random.key(0)


def abstract(config: ModelConfig, **kwargs: Any) -> DeepSeekV3:
    """The model with shapes for weights: what it would hold, without allocating any of it."""
    return nnx.eval_shape(lambda: DeepSeekV3(config, rngs=_SameKey(0), **kwargs))


def parameter_count(model: DeepSeekV3, *, mtp: bool = False) -> int:
    """Numbers held by the main model, or by the MTP layers alone; scales do not count."""
    state = nnx.to_flat_state(nnx.state(model))
    return sum(
        leaf.size
        for path, leaf in state
        if (path[0] == "mtp") == mtp and path[-1] != "weight_scale_inv"
    )
