"""QK-clip: a bound on the scores of each attention head (Kimi K2 report, arXiv 2507.20534, 2.1).

Muon can let the scores of a few heads grow without bound. After each step, a head whose largest
score S in the batch exceeds a threshold gets scaled weights: by ``sqrt(threshold / S)`` the rows of
its queries and keys without rope, and by ``threshold / S`` the rows of its rotated query. The rope
key, which all heads share, does not change. S is then the threshold.

Attention's kernels do not return S: a log-sum-exp exceeds it by up to the logarithm of the number
of keys. So scores are computed again, but only where S can exceed the threshold: for a block of
queries in which the product of the largest query norm and the largest norm of its keys does, in any
head. This takes ``2 T K`` FLOPs for each query, head and layer, of attention's own ``T (K + V)``,
and ``8 T`` bytes for scores that go through memory. Elsewhere it costs the norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.block import DecoderLayer, LayerRunner
from dsv3_jax.layers.moe import RoutingStats
from dsv3_jax.layers.on_mesh import on_mesh
from dsv3_jax.layers.rope import Rotation
from dsv3_jax.training.tree import Tree

_QUERIES_PER_BLOCK = 256
"""Queries whose scores with all keys are in memory at a time."""


def run_with_max_scores(
    run: LayerRunner, threshold: float
) -> tuple[LayerRunner, list[Float32[Array, " H"]]]:
    """Returns a function that runs layers as ``run`` does, and the list to which it appends each
    layer's :func:`max_scores` over all sequences while it is traced."""
    all_maxima: list[Float32[Array, " H"]] = []

    def run_layers(
        layers: Sequence[DecoderLayer], x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], list[RoutingStats]]:
        all_stats: list[RoutingStats] = []
        for layer in layers:
            all_maxima.append(jnp.max(_layer_max_scores(layer, x, rotation, threshold), axis=0))
            x, stats = run([layer], x, rotation)
            all_stats += stats
        return x, all_stats

    return run_layers, all_maxima


def clip(
    params: Tree, maxima: Float32[Array, "L H"], threshold: float, config: ModelConfig
) -> Tree:
    """Returns the parameters with those heads scaled whose largest score exceeds ``threshold``.

    Args:
      params: weights of the whole model.
      maxima: largest score of each head, by layer, with MTP layers last.
    """
    factors = threshold / jnp.maximum(maxima, threshold)
    roots = jnp.sqrt(factors)
    N, R, V = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim

    def rows(*parts: tuple[jax.Array, int]) -> Float32[Array, "L rows 1"]:
        """Returns the factor of each row: of each head's parts, given by factor and width."""
        columns = [jnp.repeat(factor[..., None], width, axis=-1) for factor, width in parts]
        return jnp.concatenate(columns, axis=-1).reshape(len(maxima), -1, 1)

    queries = rows((roots, N), (factors, R))
    by_name = {
        "q_proj": queries,
        "q_b_proj": queries,
        "kv_b_proj": rows((roots, N), (jnp.ones_like(factors), V)),
    }
    clipped = []
    for path, weight in nnx.to_flat_state(params):
        if "self_attn" in path and (name := str(path[-2])) in by_name:
            layer = int(str(path[1])) + (config.num_hidden_layers if path[0] == "mtp" else 0)
            weight = weight.replace(weight.get_value() * by_name[name][layer])
        clipped.append((path, weight))
    return nnx.from_flat_state(clipped)


def _layer_max_scores(
    layer: DecoderLayer, x: Float[Array, "B T D"], rotation: Rotation, threshold: float
) -> Float32[Array, "B H"]:
    """Returns :func:`max_scores` of a layer's attention, for the layer's input."""

    def scores(attention: Any, normed: jax.Array, rotation: Rotation) -> jax.Array:
        keys, _ = attention.expand(attention.latents(normed, rotation))
        queries = attention.queries(attention.query_latent(normed), rotation)
        queries = jnp.concatenate(queries, axis=-1)
        scale = layer.self_attn.config.softmax_scale
        return max_scores(queries, keys, scale, threshold, rotation.first_keys)

    graph, weights = nnx.split(layer.self_attn)
    attention = nnx.merge(graph, jax.lax.stop_gradient(weights))
    normed = jax.lax.stop_gradient(layer.input_layernorm(x))
    if (layout := layer.layout) is None:
        return scores(attention, normed, rotation)
    batch, heads = (layout.partition_spec(axes) for axes in (("batch",), ("batch", "heads")))
    return on_mesh(layout, attention, scores, (batch, batch), heads)(normed, rotation)


def max_scores(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B T H K"],
    scale: float,
    threshold: float,
    first_keys: Int[Array, "B T"] | None = None,
) -> Float32[Array, "B H"]:
    """Returns each head's largest score in causal attention, from ``first_keys`` or 0 on, where it
    exceeds ``threshold``. Elsewhere the result is not above ``threshold``, and may be -inf."""
    B, T, H, _ = queries.shape
    step = min(T, _QUERIES_PER_BLOCK)
    count = -(-T // step)

    def norms(x: jax.Array) -> Float32[Array, "B T H"]:
        return jnp.linalg.norm(x.astype(jnp.float32), axis=-1)

    def blocks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, count * step - T), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(B, count, step, *x.shape[2:]), 1, 0)

    def block(
        maxima: Float32[Array, "B H"], inputs: tuple[Any, ...]
    ) -> tuple[Float32[Array, "B H"], None]:
        first, queries, query_norms, key_norms, first_keys = inputs
        # The last key that the block sees has the largest norm of those before it, too.
        bound = scale * jnp.max(query_norms, axis=1) * jnp.max(key_norms, axis=1)
        # 1.01: float32 norms, and scores of bfloat16 arrays, are rounded.
        is_needed = jnp.any(1.01 * bound > jnp.maximum(maxima, threshold))

        def exact() -> jax.Array:
            scores = jnp.einsum(
                "bthk,bshk->bhts", queries, keys, preferred_element_type=jnp.float32
            )
            position = first + jnp.arange(step)[:, None]
            is_seen = (jnp.arange(T) <= position) & (position < T)
            if first_keys is not None:
                is_seen &= jnp.arange(T) >= first_keys[:, None, :, None]
            scores = jnp.where(is_seen, scale * scores, -jnp.inf)
            return jnp.maximum(maxima, jnp.max(scores, axis=(-2, -1)))

        return jax.lax.cond(is_needed, exact, lambda: maxima), None

    starts = step * jnp.arange(count, dtype=jnp.int32)
    largest = jax.lax.cummax(norms(keys), axis=1)
    inputs = (starts, blocks(queries), blocks(norms(queries)), blocks(largest))
    inputs = (*inputs, None if first_keys is None else blocks(first_keys))
    return jax.lax.scan(block, jnp.full((B, H), -jnp.inf, jnp.float32), inputs)[0]
