"""DeepSeek sparse attention: latent attention to the tokens that an indexer selects (V3.2 report).

A query attends to at most ``index_topk`` tokens, in the absorbed form, because each query would
have to expand its own tokens. Where no query of a batch sees more tokens than that, the selection
is everything: attention is that of the base class, bit for bit, and the indexer only caches keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.attention import MultiHeadLatentAttention
from dsv3_jax.layers.cached_attention import group_tables, split_groups
from dsv3_jax.layers.indexer import Indexer, IndexQueries
from dsv3_jax.layers.linear import WeightArgs
from dsv3_jax.layers.paged_cache import (
    AppendedTokens,
    LayerCache,
    LayerCacheSpec,
    PageShard,
    append_batches,
    read_latents,
    split_tokens,
)
from dsv3_jax.layers.rope import Rotation
from pallas_kernels import mla_decode_schedule, sparse_mla_decode, sparse_mla_prefill
from pallas_kernels.hopper.split_kv import Schedule

_Result = tuple[Float[Array, "B T H _"], Float32[Array, "B T H"]]


class SparseAttention(MultiHeadLatentAttention):
    """Latent attention with an indexer, whose keys are cached in addition to the latents."""

    def __init__(self, config: ModelConfig, **weights: Unpack[WeightArgs]):
        super().__init__(config, **weights)
        self.indexer = Indexer(config, **weights)
        self.is_dense = False  # whole sequences attend to all tokens: see training.indexer

    def __call__(
        self, x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T CR"]]:
        """Returns causal self-attention of whole sequences, and the latents of their tokens."""
        B, T, _ = x.shape
        if self.is_dense or self.indexer.topk >= T:
            return super().__call__(x, rotation)
        if rotation.first_keys is not None:
            raise ValueError(
                "first_keys: expected None with sparse attention, got packed documents"
            )
        query_latent = self.query_latent(x)
        latent = read_latents(self.config, self.stored_latents(x, rotation), x.dtype)
        q_nope, q_rope = self.queries(query_latent, rotation)
        indices = self.indexer.select(
            self.indexer.queries(x, query_latent, rotation),
            self.indexer.whole_pages(x, rotation),
            jnp.arange(B, dtype=jnp.int32)[:, None],
            jnp.zeros((B,), jnp.int32),
            PageShard(page_size=T),
        )
        out, _ = sparse_mla_prefill(
            self._fold(q_nope), q_rope, latent, indices, scale=self.config.softmax_scale
        )
        return self.output(self.unfold(out, x.dtype).astype(x.dtype)), latent

    def cache_spec(self, dtype: DTypeLike) -> LayerCacheSpec:
        """Returns the latents and the indexer's keys."""
        return super().cache_spec(dtype) | self.indexer.cache_spec(dtype)

    def _append(
        self,
        x: Float[Array, "_ _ D"],
        query_latent: Float[Array, "_ _ Q"],
        rotation: Rotation,
        caches: Sequence[LayerCache],
    ) -> list[AppendedTokens]:
        entries = {"latent": self.stored_latents(x, rotation)}
        entries |= self.indexer.entries(x, rotation)
        queries = self.indexer.queries(x, query_latent, rotation)
        by_batch = zip(*(split_tokens(each, caches) for each in queries), strict=True)
        return [
            batch._replace(index_queries=IndexQueries(*each))
            for batch, each in zip(
                append_batches(entries, caches, self.layout), by_batch, strict=True
            )
        ]

    def _attend_expanded(
        self,
        q_nope: Float[Array, "B T H N"],
        q_rope: Float[Array, "B T H R"],
        batch: AppendedTokens,
    ) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
        dense = super()._attend_expanded

        def sparse() -> _Result:
            out, lse = self._attend_selected(self._fold(q_nope), q_rope, batch)
            return self.unfold(out, q_nope.dtype).astype(q_nope.dtype), lse

        return self._dense_or_sparse(batch, lambda: dense(q_nope, q_rope, batch), sparse)

    def _attend_absorbed(
        self,
        q_latent: Float[Array, "B T H C"],
        q_rope: Float[Array, "B T H R"],
        batch: AppendedTokens,
        schedule: Schedule | None = None,
    ) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
        dense, cache = super()._attend_absorbed, batch.cache
        if batch.shard.num_shards == 1 and schedule is None:
            # All layers have the same. XLA would not notice that inside of a conditional.
            tables, lengths = group_tables(cache.block_tables, cache.starts, cache.valid)
            _, queries, heads, _ = split_groups(q_latent).shape
            schedule = mla_decode_schedule(
                lengths, queries=queries, heads=heads, max_pages=tables.shape[1]
            )
        return self._dense_or_sparse(
            batch,
            lambda: dense(q_latent, q_rope, batch, schedule),
            lambda: self._attend_selected(q_latent, q_rope, batch),
        )

    def _dense_or_sparse(
        self, batch: AppendedTokens, dense: Callable[[], _Result], sparse: Callable[[], _Result]
    ) -> _Result:
        """Returns ``dense()`` if all queries see at most ``index_topk`` tokens, else ``sparse()``.

        Both have the same value then, but not the same last bits. So the form that a sequence gets
        depends on the others of the batch, unless sequences are to be attended to whole.
        """
        cache, shard, topk = batch.cache, batch.shard, self.indexer.topk
        if self.whole_sequences:
            return sparse()
        if cache.block_tables.shape[1] * shard.page_size * shard.num_shards <= topk:
            return dense()
        if shard.num_shards > 1:  # no branch: the devices exchange scores in one of them
            return sparse()
        longest = jnp.max(cache.starts + jnp.sum(cache.valid, axis=1))
        return jax.lax.cond(longest <= topk, dense, sparse)

    def _attend_selected(
        self,
        q_latent: Float[Array, "B T H C"],
        q_rope: Float[Array, "B T H R"],
        batch: AppendedTokens,
    ) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
        """Returns attention to the selected tokens on this device, and its log-sum-exp."""
        cache, shard = batch.cache, batch.shard
        indices = self.indexer.select(
            batch.index_queries, cache.pages, cache.block_tables, cache.starts, shard, self.layout
        )
        is_local, local = shard.local_positions(indices)
        indices = jnp.where(is_local & (indices >= 0), local, -1)
        return sparse_mla_decode(
            q_latent,
            q_rope,
            cache.pages["latent"],
            cache.block_tables,
            indices,
            scale=self.config.softmax_scale,
        )
