"""Training of indexers: their scores learn which tokens attention gives weight to.

The probabilities of all heads of attention are averaged to one distribution p over tokens. The loss
of an indexer with scores I is the mean over queries of (DeepSeek-V3.2 report, section 2.1.1)::

    KL(p || softmax(I))

There are two stages. In the ``dense`` warm-up attention is dense, and everything but the indexers
is frozen; the report takes 1,000 steps at a learning rate of 1e-3. In the ``sparse`` stage all
weights are trained, attention is sparse, and both distributions are over the selected tokens; the
report takes 15,000 steps at 7.3e-6. In both, the indexer's input is detached: only this loss
changes an indexer, and it changes nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from dsv3_jax.layers.block import DecoderLayer, LayerRunner
from dsv3_jax.layers.moe import RoutingStats
from dsv3_jax.layers.rope import Rotation
from dsv3_jax.layers.sparse_attention import SparseAttention
from dsv3_jax.training.config import IndexerStage
from pallas_kernels import sparse_index, top_k

_QUERIES_PER_BLOCK = 64
"""Queries whose scores with all tokens are in memory at a time."""

Heads = Float32[Array, "B H t S"]
Scores = Float32[Array, "B t S"]


def is_indexer(path: tuple[Any, ...]) -> bool:
    """Returns whether the parameter at ``path`` in the model belongs to an indexer."""
    return "indexer" in path


def run_with_divergences(
    run: LayerRunner, stage: IndexerStage
) -> tuple[LayerRunner, list[Float32[Array, ""]]]:
    """Returns a function that runs layers as ``run`` does, and the list to which it appends the
    loss of each layer's indexer while it is traced.

    Its n-th call, from 0, runs layers on sequences whose last n positions are padding, as
    :meth:`dsv3_jax.model.DeepSeekV3.hidden_states` calls it."""
    divergences: list[Float32[Array, ""]] = []
    calls = itertools.count()

    def run_layers(
        layers: Sequence[DecoderLayer], x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], list[RoutingStats]]:
        all_stats: list[RoutingStats] = []
        queries = x.shape[1] - next(calls)
        for layer in layers:
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            assert isinstance(attention, SparseAttention)
            attention.is_dense = stage == "dense"
            inputs = jax.tree.map(lambda each: each[:, :queries], (normed, rotation))
            loss = divergence(attention, *inputs, selected=stage == "sparse")
            divergences.append(loss)
            x, stats = run([layer], x, rotation)
            all_stats += stats
        return x, all_stats

    return run_layers, divergences


def divergence(
    attention: SparseAttention,
    x: Float[Array, "B T D"],
    rotation: Rotation,
    *,
    selected: bool,
) -> Float32[Array, ""]:
    """Returns the loss of an indexer, in nats. Its gradient is that of the indexer's weights.

    Args:
      x: input of the attention.
      selected: whether the distributions are over the selected tokens instead of all.
    """

    def of_block(heads: Heads, scores: Scores, visible: Bool[Array, "#B t S"]) -> jax.Array:
        if selected:
            visible = _chosen(scores, attention.indexer.topk)
        p = _mean_probabilities(heads, visible)
        log_q = jax.nn.log_softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        # The logarithm of p is not finite where p is 0.
        terms = p * (jnp.log(jnp.where(p > 0, p, 1.0)) - jnp.where(visible, log_q, 0.0))
        return jnp.sum(terms, axis=-1)

    return jnp.mean(_by_block(attention, x, rotation, of_block))


def recall(
    attention: SparseAttention, x: Float[Array, "B T D"], rotation: Rotation
) -> Float32[Array, ""]:
    """Returns which share of the ``index_topk`` tokens with the largest mean probability of dense
    attention the indexer selects, over the queries that see more tokens than that."""
    topk = attention.indexer.topk

    def of_block(heads: Heads, scores: Scores, visible: Bool[Array, "#B t S"]) -> jax.Array:
        p = jnp.where(visible, _mean_probabilities(heads, visible), -jnp.inf)
        return jnp.sum(_chosen(p, topk) & _chosen(scores, topk), axis=-1) / topk

    return jnp.mean(_by_block(attention, x, rotation, of_block)[:, topk:])


def _mean_probabilities(heads: Heads, mask: Bool[Array, "#B t S"]) -> Scores:
    probabilities = jax.nn.softmax(jnp.where(mask[:, None], heads, -jnp.inf), axis=-1)
    return jax.lax.stop_gradient(jnp.mean(probabilities, axis=1))


def _chosen(scores: Scores, k: int) -> Bool[Array, "B t S"]:
    """Returns True for the k largest scores of each row."""
    B, t, S = scores.shape
    indices = top_k(scores, k)
    b, q = jnp.arange(B)[:, None, None], jnp.arange(t)[:, None]
    # S is out of bounds and dropped; -1 would be the last token.
    indices = jnp.where(indices < 0, S, indices)
    return jnp.zeros(scores.shape, bool).at[b, q, indices].set(True, mode="drop")


def _by_block(
    attention: SparseAttention,
    x: Float[Array, "B T D"],
    rotation: Rotation,
    function: Callable[[Heads, Scores, Bool[Array, "#B t S"]], jax.Array],
) -> Float32[Array, "B T"]:
    """Calls ``function`` for blocks of queries, and joins its results [B, t].

    Its arguments are the scores of attention's heads, those of the indexer (-inf for tokens that a
    query does not see), and which tokens the queries see.
    """
    x = jax.lax.stop_gradient(x)
    B, T, _ = x.shape
    latent, keys, q = jax.lax.stop_gradient(_attention_arrays(attention, x, rotation))
    index_queries = attention.indexer.queries(x, latent, rotation)
    index_keys = attention.indexer.whole_pages(x, rotation)["index_key"]
    key_dtype = index_keys.dtype
    if is_float := jnp.issubdtype(key_dtype, jnp.floating):
        # The gradient of a key is the sum over all blocks of queries, in the dtype that it has
        # outside of the loop.
        index_keys = index_keys.astype(jnp.float32)
    step = min(T, _QUERIES_PER_BLOCK)
    count = -(-T // step)
    one_page_each = jnp.arange(B, dtype=jnp.int32)[:, None]

    def split(x: jax.Array) -> jax.Array:
        padding = ((0, 0), (0, count * step - T), *((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(jnp.pad(x, padding).reshape(B, count, step, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def block(inputs: tuple[jax.Array, ...]) -> jax.Array:
        first, q, index_q, weights = inputs
        heads = jnp.einsum("bthk,bshk->bhts", q, keys, preferred_element_type=jnp.float32)
        lengths = jnp.full((B,), first + step, jnp.int32)
        scores = sparse_index(
            index_q,
            weights,
            index_keys.astype(key_dtype),
            one_page_each,
            lengths,
            page_size=None if is_float else T,
            implementation="reference",  # it has a gradient
        )
        visible = jnp.arange(T) <= (first + jnp.arange(step))[:, None]
        return function(heads * attention.config.softmax_scale, scores, visible[None])

    firsts = step * jnp.arange(count, dtype=jnp.int32)
    results = jax.lax.map(block, (firsts, split(q), *map(split, index_queries)))
    return jnp.moveaxis(results, 0, 1).reshape(B, count * step)[:, :T]


def _attention_arrays(
    attention: SparseAttention, x: Float[Array, "B T D"], rotation: Rotation
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the query latent, and keys and queries of every head."""
    latent = attention.query_latent(x)
    keys, _ = attention.expand(attention.latents(x, rotation))
    return latent, keys, jnp.concatenate(attention.queries(latent, rotation), axis=-1)
