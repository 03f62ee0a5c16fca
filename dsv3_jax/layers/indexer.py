"""The lightning indexer of DeepSeek-V3.2: it selects the tokens that a query attends to.

With J heads of width D and one key per token, token s has for query t the score (V3.2 report,
equation 1; the constant factors come from DeepSeek's inference code)::

    I[t, s] = sum_j w[t, j] relu(q[t, j] . k[s]),    w = (weights_proj x) J^-0.5 D^-0.5

Queries come from the query latent of attention, keys and head weights from the layer's input. The
first R dimensions of queries and keys are rotated by the angles of attention, but in another
layout: the pairs are (x0, x_{R/2}), ..., unless ``indexer_rope_interleave`` is set.

Keys are cached in the dtype of the activations. DeepSeek's own inference caches them in float8
(:meth:`Indexer.use_float8_keys`): 128 bytes and a scale of four per token, all keys of a page and
then all its scales in one array.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped, UInt8

from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.linear import Linear, WeightArgs
from dsv3_jax.layers.norm import LayerNorm
from dsv3_jax.layers.paged_cache import CachedArray, LayerCacheSpec, LayerPages, PageShard
from dsv3_jax.layers.rope import Rotation, rotate
from dsv3_jax.quantization import BlockQuantization
from pallas_kernels import block_quant, sparse_index, top_k
from pallas_kernels.sparse_index import scaled_pages
from sharding import Layout

_KEY_NORM_EPS = 1e-6

SCORE_BYTES = 256 << 20
"""Bytes of scores at a time, for some queries of all sequences and every cached token: 512 queries
at 128k tokens."""


class IndexQueries(NamedTuple):
    """Queries of the indexer for some tokens."""

    q: Float[Array, "B T J D"]  # rotated. In float8 their scales are in the weights.
    weights: Float32[Array, "B T J"]


def index_cache_spec(
    config: ModelConfig, dtype: DTypeLike, *, float8: bool = False
) -> LayerCacheSpec:
    """Returns what an indexer caches, a scaled array in float8: nothing in models without one.
    Float8 keys need a Hadamard matrix, and so an ``index_head_dim`` that is a power of two."""
    if (D := config.index_head_dim) is None:
        return {}
    if not float8:
        return {"index_key": CachedArray(D, dtype)}
    if D & (D - 1):
        raise ValueError(f"index_head_dim: expected a power of two for float8 keys, got {D}")
    return {"index_key": CachedArray(D, jnp.uint8, is_scaled=True)}


class Indexer(nnx.Module):
    """The indexer of one layer. Parameters are named as in the checkpoint."""

    def __init__(self, config: ModelConfig, **weights: Unpack[WeightArgs]):
        J, D, Q = config.index_n_heads, config.index_head_dim, config.q_lora_rank
        if J is None or D is None or Q is None or config.index_topk is None:
            raise ValueError(f"config: expected an indexer, got model_type {config.model_type}")
        self.config = config
        self.topk = config.index_topk
        self.float8_keys = False
        std = config.initializer_range
        self.wq_b = Linear(Q, J * D, std=std, **weights)
        self.wk = Linear(config.hidden_size, D, std=std, **weights)
        self.k_norm = LayerNorm(D, eps=_KEY_NORM_EPS)
        rngs, dtype = weights["rngs"], weights["dtype"]  # never quantized
        self.weights_proj = Linear(config.hidden_size, J, std=std, rngs=rngs, dtype=dtype)

    def use_float8_keys(self) -> None:
        """Makes queries and keys float8, with one scale per vector, as in DeepSeek's inference. A
        Hadamard matrix spreads outliers first, and leaves exact dot products as they are."""
        index_cache_spec(self.config, jnp.float32, float8=True)
        self.float8_keys = True

    def cache_spec(self, dtype: DTypeLike) -> LayerCacheSpec:
        """Returns the page arrays of the keys."""
        return index_cache_spec(self.config, dtype, float8=self.float8_keys)

    def queries(
        self,
        x: Float[Array, "B T D_model"],
        query_latent: Float[Array, "B T Q"],
        rotation: Rotation,
    ) -> IndexQueries:
        """Returns the queries of tokens with these inputs and query latents."""
        f32, J = jnp.float32, self.weights_proj.weight.shape[0]
        q = self.wq_b(query_latent)
        q = self._rotate(q.reshape(*q.shape[:2], J, -1), rotation)
        weights = self.weights_proj(x.astype(f32), f32) * (J * q.shape[-1]) ** -0.5
        if self.float8_keys:
            q, scale = self._quantize(q)
            weights *= scale[..., 0]
        return IndexQueries(q, weights)

    def entries(
        self, x: Float[Array, "B T D_model"], rotation: Rotation
    ) -> dict[str, Float[Array, "B T _"] | UInt8[Array, "B T _"]]:
        """Returns what the cache stores for each token, by the names of :meth:`cache_spec`."""
        keys = self._rotate(self.k_norm(self.wk(x)), rotation)
        if not self.float8_keys:
            return {"index_key": keys}
        return {"index_key": scaled_pages.token_bytes(*self._quantize(keys))}

    def whole_pages(
        self, x: Float[Array, "B T D_model"], rotation: Rotation
    ) -> dict[str, Shaped[Array, "B _ _"]]:
        """Returns the page arrays of whole sequences, one page of T tokens for each."""
        entries = self.entries(x, rotation)
        if self.float8_keys:
            entries["index_key"] = scaled_pages.pages_of(entries["index_key"])
        return entries

    def select(
        self,
        queries: IndexQueries,
        pages: LayerPages,
        block_tables: Int[Array, "B max_pages"],
        starts: Int[Array, " B"],
        shard: PageShard,
        layout: Layout | None = None,
    ) -> Int32[Array, "B T K"]:
        """Returns the positions of the ``index_topk`` best tokens of each query, in order.

        Query t of a sequence sees ``starts + t + 1`` tokens. If these are fewer than
        ``index_topk``, it selects all of them, and -1 fills the rest. Ties go to the earlier token.
        No gradient flows through the selection.

        Args:
          pages: the page arrays on this device, with the T new tokens.
          block_tables: numbers of each sequence's pages on this device.
          starts: tokens per sequence before the new ones, on all devices that share a sequence.
          shard: this device's part of each sequence. Every device returns the same positions.
        """
        queries, pages = jax.lax.stop_gradient((queries, pages))
        B, T = queries.weights.shape[:2]
        tokens = block_tables.shape[1] * shard.page_size * shard.num_shards
        step = min(T, max(1, SCORE_BYTES // (4 * B * tokens)))

        def select_some(inputs: tuple[IndexQueries, Int[Array, ""]]) -> Int32[Array, "B t K"]:
            some, first = inputs
            scores = _scores(some, pages, block_tables, starts + first, shard, layout)
            visible = starts[:, None] + first + 1 + jnp.arange(scores.shape[1])
            return top_k(scores, self.topk, lengths=visible)

        if step == T:
            return select_some((queries, jnp.int32(0)))
        blocks = -(-T // step)

        def split(x: jax.Array) -> jax.Array:
            padding = ((0, 0), (0, blocks * step - T), *((0, 0),) * (x.ndim - 2))
            return jnp.moveaxis(jnp.pad(x, padding).reshape(B, blocks, step, *x.shape[2:]), 1, 0)

        firsts = step * jnp.arange(blocks, dtype=jnp.int32)
        selected = jax.lax.map(select_some, (IndexQueries(*map(split, queries)), firsts))
        return jnp.moveaxis(selected, 0, 1).reshape(B, blocks * step, -1)[:, :T]

    def _rotate(
        self, x: Float[Array, "B T *heads D"], rotation: Rotation
    ) -> Float[Array, "B T *heads D"]:
        """Rotates the first R of D dimensions. Attention rotates the last ones of its heads."""
        R = self.config.qk_rope_head_dim
        interleaved = self.config.indexer_rope_interleave
        rotated = rotate(x[..., :R], rotation, interleaved=interleaved)
        return jnp.concatenate([rotated, x[..., R:]], axis=-1)

    def _quantize(
        self, x: Float[Array, "B T *heads D"]
    ) -> tuple[Float[Array, "B T *heads D"], Float32[Array, "B T *heads 1"]]:
        """Returns Hadamard-rotated vectors in float8, and their scales."""
        D, quantization = x.shape[-1], self.config.quantization
        rotated = jnp.matmul(
            x.astype(jnp.float32),
            jnp.asarray(hadamard(D) * D**-0.5, jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        scale_fmt: Any = "float32"
        if isinstance(quantization, BlockQuantization):
            scale_fmt = quantization.scale_fmt
        rows = rotated.reshape(-1, D)
        values, scale = block_quant(rows, (1, D), scale_fmt=scale_fmt)
        return values.reshape(x.shape), scale.reshape(*x.shape[:-1], 1)


def hadamard(size: int) -> np.ndarray:
    """Returns the Hadamard matrix of a power of two, with entries of 1 and -1 (Sylvester)."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _scores(
    queries: IndexQueries,
    pages: LayerPages,
    block_tables: Int[Array, "B max_pages"],
    starts: Int[Array, " B"],
    shard: PageShard,
    layout: Layout | None,
) -> Float32[Array, "B T S"]:
    """Returns the scores of all S cached tokens, -inf where a query does not see one. Where devices
    share the tokens of a sequence, each scores its own, and all gather the scores."""
    B, T = queries.weights.shape[:2]
    keys = pages["index_key"]
    page_size = shard.page_size if keys.dtype == jnp.uint8 else None
    if shard.num_shards == 1:
        return sparse_index(*queries, keys, block_tables, starts + T, page_size=page_size)
    assert layout is not None
    # Which of a device's tokens a query sees follows from positions, and is masked below: here
    # every query sees all of them.
    local = shard.local_lengths(starts + T) + T - 1
    scores = sparse_index(*queries, keys, block_tables, local, page_size=page_size)
    gathered = layout.all_gather(scores, "cached_tokens")
    by_page = gathered.reshape(shard.num_shards, B, T, -1, shard.page_size)
    scores = by_page.transpose(1, 2, 3, 0, 4).reshape(B, T, -1)
    visible = starts[:, None] + 1 + jnp.arange(T)
    return jnp.where(jnp.arange(scores.shape[-1]) < visible[..., None], scores, -jnp.inf)
