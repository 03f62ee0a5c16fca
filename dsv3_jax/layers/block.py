"""One decoder layer, and the multi-token prediction layer built on it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from dsv3_jax.attn_impl import AttnImpl
from dsv3_jax.config import ModelConfig
from dsv3_jax.kv_cache import PAGES
from dsv3_jax.layers import attention_variants
from dsv3_jax.layers.attention import Form, LayerCache, MultiHeadLatentAttention
from dsv3_jax.layers.attention_variants import MaterializedProjections, materialize
from dsv3_jax.layers.linear import Linear
from dsv3_jax.layers.mlp import MLP
from dsv3_jax.layers.moe import MoE, RoutingStats
from dsv3_jax.layers.norm import RMSNorm
from dsv3_jax.layers.on_mesh import by_rows, on_mesh
from dsv3_jax.layers.rope import Rotation
from dsv3_jax.quantization import Quantization
from sharding import Layout


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
        self.layout: Layout | None = None  # see DeepSeekV3.lay_out
        self.attn_impl: AttnImpl | None = None  # see DeepSeekV3.use_attn_impl
        self._materialized: MaterializedProjections | None = None
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
        if self.layout is None:
            return self._whole(x, rotation)
        rows = self.layout.partition_spec(("batch",))

        def whole(layer: DecoderLayer, x: Array, rotation: Rotation):
            parts = _micro_batches(layer.layout, (x, rotation))
            return _joined([layer._whole(*part) for part in parts])

        body = on_mesh(self.layout, self, whole, (rows, rows), (rows, self._stats))
        return body(x, rotation)

    def _whole(
        self, x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], RoutingStats | None]:
        attended, _ = self.self_attn(self.input_layernorm(x), rotation)
        return self._feed_forward(x, attended, None)

    def extend(
        self, x: Float[Array, "B T D"], rotation: Rotation, cache: LayerCache, form: Form
    ) -> tuple[Float[Array, "B T D"], Float[Array, "P page width"], RoutingStats | None]:
        """T new tokens a row behind those in the cache; also the extended cache."""
        if self.layout is None:
            return self._extended(x, rotation, cache, form)
        rows = self.layout.partition_spec(("batch",))

        def extended(layer: DecoderLayer, x: Array, rotation: Rotation, cache: LayerCache):
            cache, pages, found = _own_pages(layer.layout, cache), cache.pages, []
            rows = (x, rotation, cache._replace(pages=None))
            for x, rotation, part in _micro_batches(layer.layout, rows):
                y, pages, stats = layer._extended(x, rotation, part._replace(pages=pages), form)
                found.append((y, stats))
            y, stats = _joined(found)
            return y, pages, stats

        pages = self.layout.partition_spec(PAGES)
        cached: Any = LayerCache(pages, rows, rows, rows)  # pyright: ignore
        specs = rows, rows, cached
        body = on_mesh(self.layout, self, extended, specs, (rows, pages, self._stats))
        return body(x, rotation, cache)

    def _extended(
        self, x: Float[Array, "B T D"], rotation: Rotation, cache: LayerCache, form: Form
    ) -> tuple[Float[Array, "B T D"], Float[Array, "P page width"], RoutingStats | None]:
        step = self.input_layernorm(x), rotation, cache, form
        if self.attn_impl is None:
            attended, pages = self.self_attn.extend(*step)
        else:
            attended, pages = attention_variants.extend(
                self.self_attn, *step, self.attn_impl, self._materialized
            )
        y, stats = self._feed_forward(x, attended, cache.valid)
        return y, pages, stats

    def ready_to_decode(self, dtype: DTypeLike) -> None:
        """Makes what decode wants of the weights: see DeepSeekV3.ready_to_decode."""
        if self.attn_impl == "AM_CC_ME":
            self._materialized = nnx.data(materialize(self.self_attn, dtype))
        elif self.attn_impl not in ("CD", "CC"):
            self.self_attn.hold_up_projections(dtype)

    @property
    def _stats(self) -> RoutingStats | None:
        """How statistics lie on the mesh."""
        assert self.layout is not None
        rows = self.layout.partition_spec(("batch",))
        dense = isinstance(self.mlp, MLP)
        return None if dense else RoutingStats(PartitionSpec(), rows, rows)  # pyright: ignore

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


def _micro_batches(layout: Layout | None, rows: Any) -> list[Any]:
    """Trees of a device's rows, cut into as many as ``layout`` says."""
    assert layout is not None
    parts = layout.micro_batches
    cut = jax.tree.map(lambda x: jnp.split(x, parts), rows)
    return [jax.tree.map(lambda _, x, i=i: x[i], rows, cut) for i in range(parts)]


def _joined(
    parts: list[tuple[Float[Array, "B T D"], RoutingStats | None]],
) -> tuple[Float[Array, "all T D"], RoutingStats | None]:
    """What a layer gives of all rows, from what it gave of micro-batches."""
    if len(parts) == 1:
        return parts[0]
    y = jnp.concatenate([y for y, _ in parts])
    stats = [each for _, each in parts if each is not None]
    if not stats:
        return y, None
    counts, scores, experts = zip(*stats, strict=True)
    total = functools.reduce(jnp.add, counts)
    return y, RoutingStats(total, jnp.concatenate(scores), jnp.concatenate(experts))


def _own_pages(layout: Layout | None, cache: LayerCache) -> LayerCache:
    """With the table of the device's own pages, as it counts them: of a row's pages every n-th one,
    where n devices share its tokens."""
    assert layout is not None
    first = layout.shard_index(PAGES[0]) * cache.pages.shape[0]
    B, n = len(cache.block_tables), layout.num_shards("cached_tokens")
    own = cache.block_tables.reshape(B, -1, n)[..., layout.shard_index("cached_tokens")]
    return cache._replace(block_tables=own - first)


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
        joined = jnp.concatenate([self.enorm(next_embedding), self.hnorm(hidden)], axis=-1)
        return by_rows(self.layout, "eh_proj", self.eh_proj, joined)


def _add(x: Float[Array, "B T D"], y: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
