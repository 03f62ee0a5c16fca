"""Runs a decoder layer on the devices of its layout, each on its own sequences in micro-batches.

Without a layout, the layer's function is called as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from dsv3_jax.layers.moe import MoE, RoutingStats
from dsv3_jax.layers.on_mesh import on_mesh
from dsv3_jax.layers.paged_cache import (
    PAGE_AXES,
    Form,
    LayerCache,
    LayerPages,
    join_tokens,
    split_tokens,
)
from dsv3_jax.layers.rope import Rotation
from sharding import Layout

ForwardCached = Callable[..., tuple[Array, LayerPages, RoutingStats | None]]
"""A function with the arguments of ``DecoderLayer.forward_cached``, the layer first."""

_BatchInput = tuple[Float[Array, "_ _ D"], Rotation, LayerCache]
"""Tokens of one batch, their rotation, and its cache, without page arrays."""


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The modules of a layer and its weights' shapes: a static argument under jit. The hash leaves
    the modules out, which may have attributes without one, such as lists."""

    graph: nnx.GraphDef[Any] = dataclasses.field(hash=False)
    weights: tuple[tuple[tuple[int, ...], Any], ...]


def split(layer: nnx.Module) -> tuple[LayerKind, Any]:
    """Returns the kind of a layer, and its weights."""
    graph, weights = nnx.split(layer)
    return LayerKind(graph, tuple((x.shape, x.dtype) for x in jax.tree.leaves(weights))), weights


@functools.partial(jax.jit, static_argnums=(0, 1))
def extend_layer(
    forms: tuple[Form, ...],
    kind: LayerKind,
    weights: Any,
    xs: list[Float[Array, "_ _ D"]],
    rotations: list[Rotation],
    caches: list[LayerCache],
    pages: LayerPages,
    override: Any,
) -> tuple[list[Float[Array, "_ _ D"]], LayerPages, Int[Array, " E"] | None]:
    """Returns a layer's output for each batch, its extended pages, and how many tokens chose each
    expert. ``override.forward_cached`` replaces the layer's, unless it is None. It is jitted so
    that layers of the same kind are traced and lowered once."""
    caches = [cache._replace(pages=pages) for cache in caches]
    layer, run = nnx.merge(kind.graph, weights), override and override.forward_cached
    xs, pages, stats = layer.extend_batches(xs, rotations, caches, forms, run)
    return xs, pages, None if stats is None else stats.counts


def forward(
    layer: Any,
    run: Callable[..., tuple[Array, RoutingStats | None]],
    x: Float[Array, "B T D"],
    rotation: Rotation,
) -> tuple[Float[Array, "B T D"], RoutingStats | None]:
    """Returns ``run(layer, x, rotation)`` of whole sequences."""
    layout: Layout | None = layer.layout
    if layout is None:
        return run(layer, x, rotation)

    def body(layer: Any, x: Array, rotation: Rotation) -> tuple[Array, RoutingStats | None]:
        parts = _split_batch((x, rotation), layout.micro_batches)
        outputs, stats = zip(*(run(layer, *part) for part in parts), strict=True)
        return _joined(outputs), _reshaped(_joined_stats(stats), *x.shape[:2])

    sequences = layout.sequences_spec(x.shape[1])
    out_specs = sequences, _stats_specs(layer, sequences)
    y, stats = on_mesh(layout, layer, body, (sequences, sequences), out_specs)(x, rotation)
    return y, _reshaped(stats, x.shape[0] * x.shape[1])


def forward_cached(
    layer: Any,
    run: ForwardCached,
    xs: Sequence[Float[Array, "_ _ D"]],
    rotations: Sequence[Rotation],
    caches: Sequence[LayerCache],
    forms: Sequence[Form],
) -> tuple[list[Float[Array, "_ _ D"]], LayerPages, RoutingStats | None]:
    """Returns ``run(layer, x, rotation, caches, forms)`` of the joined tokens of all batches, split
    into batches again."""
    layout: Layout | None = layer.layout
    pages = caches[0].pages
    inputs = [
        (x, rotation, cache._replace(pages={}))
        for x, rotation, cache in zip(xs, rotations, caches, strict=True)
    ]

    def joined(
        layer: Any, inputs: list[_BatchInput], pages: LayerPages
    ) -> tuple[list[Array], LayerPages, RoutingStats | None]:
        xs, rotations, caches = zip(*inputs, strict=True)
        caches = [cache._replace(pages=pages) for cache in caches]
        x = join_tokens(xs)
        rotation = jax.tree.map(lambda *each: join_tokens(each), *rotations)
        y, pages, stats = run(layer, x, rotation, caches, forms)
        return split_tokens(y, caches), pages, stats

    if layout is None:
        return joined(layer, inputs, pages)

    def body(
        layer: Any, inputs: list[_BatchInput], pages: LayerPages
    ) -> tuple[list[Array], LayerPages, RoutingStats | None]:
        num_local_pages = next(iter(pages.values())).shape[0]
        inputs = [
            (x, rotation, _with_local_tables(cache, num_local_pages, layout))
            for x, rotation, cache in inputs
        ]
        outputs, all_stats = [], []
        # Each micro-batch has its own sequences; all write to the same page arrays.
        for part in _split_batch(inputs, layout.micro_batches):
            ys, pages, stats = joined(layer, part, pages)
            outputs.append(ys)
            all_stats.append(stats)
        ys = [_joined(parts) for parts in zip(*outputs, strict=True)]
        return ys, pages, _joined_stats(all_stats)

    batch = layout.partition_spec(("batch",))
    pages_specs = {name: layout.partition_spec(PAGE_AXES) for name in pages}
    out_specs = [batch] * len(xs), pages_specs, _stats_specs(layer, batch)
    return on_mesh(layout, layer, body, (batch, pages_specs), out_specs)(inputs, pages)


def _stats_specs(layer: Any, tokens: PartitionSpec) -> RoutingStats | None:
    """Returns the PartitionSpecs of the layer's statistics, with that of its tokens."""
    if not isinstance(layer.mlp, MoE):
        return None
    return RoutingStats(PartitionSpec(), tokens, tokens)  # pyright: ignore


def _reshaped(stats: RoutingStats | None, *tokens: int) -> RoutingStats | None:
    """Returns the statistics with other leading dimensions than M of what they have per token."""
    if stats is None:
        return None
    scores, experts = (x.reshape(*tokens, x.shape[-1]) for x in (stats.scores, stats.experts))
    return RoutingStats(stats.counts, scores, experts)


def _split_batch(tree: Any, parts: int) -> list[Any]:
    """Splits the first dimension of every array into ``parts``. Returns as many trees."""
    leaves, structure = jax.tree.flatten(tree)
    split_leaves = zip(*(jnp.split(x, parts) for x in leaves), strict=True)
    return [jax.tree.unflatten(structure, leaves) for leaves in split_leaves]


def _joined(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _joined_stats(parts: Sequence[RoutingStats | None]) -> RoutingStats | None:
    """Returns the statistics of whole batches, from those of micro-batches."""
    stats = [each for each in parts if each is not None]
    if not stats:
        return None
    counts, scores, experts = zip(*stats, strict=True)
    total = counts[0]
    for each in counts[1:]:
        total = total + each
    return RoutingStats(total, _joined(scores), _joined(experts))


def _with_local_tables(cache: LayerCache, num_local_pages: int, layout: Layout) -> LayerCache:
    """Returns the cache with block tables of the pages on this device, numbered from 0. Where n
    devices share a sequence's tokens, a device has every n-th page of the sequence."""
    first = layout.shard_index(PAGE_AXES[0]) * num_local_pages
    n = layout.num_shards("cached_tokens")

    local = cache.block_tables.reshape(len(cache.block_tables), -1, n)
    local = local[..., layout.shard_index("cached_tokens")]
    return cache._replace(block_tables=local - first)
