"""Ways to run decoder layers under a gradient: again in the backward pass, or as a loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dsv3_jax.layers.block import DecoderLayer
from dsv3_jax.layers.moe import RoutingStats
from dsv3_jax.layers.rope import Rotation
from dsv3_jax.model import LayerRunner
from sharding import Layout
from sharding.fsdp import save_all_but_gathered

# A layer's weights, and its function of them.
Weights = Any
Apply = Callable[..., tuple[jax.Array, RoutingStats | None]]


def layer_runner(*, remat: bool, scan: bool) -> LayerRunner:
    """The layers in order, with the results of :func:`dsv3_jax.model.one_by_one`.

    Args:
      remat: keep each layer's input alone for the backward pass, which runs the layer again. A
        third more arithmetic, for the memory of one layer's activations in place of all layers'.
      scan: stack the weights of equal consecutive layers and loop over them, so that one of them
        is compiled. The parameters stay one array a layer; stacking costs a copy of them, in the
        dtype of the computation, and another of their gradients.
    """

    def run(
        layers: Sequence[DecoderLayer], x: Float[Array, "B T D"], turn: Rotation
    ) -> tuple[Float[Array, "B T D"], list[RoutingStats]]:
        found = []
        for kind, equal in itertools.groupby(map(_Split, layers), key=lambda layer: layer.kind):
            apply = _function(kind[0], turn, remat, layers[0].layout)
            weights = [layer.weights for layer in equal]
            if scan and len(weights) > 1:
                x, stats = _scan(apply, weights, x)
            else:
                x, stats = _unroll(apply, weights, x)
            found += [one for one in stats if one is not None]
        return x, found

    return run


class _Split:
    """A layer as a static ``kind``, equal for layers of one structure and shape, and weights."""

    def __init__(self, layer: DecoderLayer):
        graph, self.weights = nnx.split(layer)
        self.kind = (graph, tuple((w.shape, w.dtype) for w in jax.tree.leaves(self.weights)))


def _function(graph: Any, turn: Rotation, remat: bool, layout: Layout | None) -> Apply:
    def apply(weights: Weights, x: jax.Array) -> tuple[jax.Array, RoutingStats | None]:
        return nnx.merge(graph, weights)(x, turn)

    if remat:
        return jax.checkpoint(apply)
    if layout is not None and layout.fsdp_axes:
        return jax.checkpoint(apply, policy=save_all_but_gathered)
    return apply


def _unroll(
    apply: Apply, weights: list[Weights], x: jax.Array
) -> tuple[jax.Array, list[RoutingStats | None]]:
    found = []
    for one in weights:
        x, stats = apply(one, x)
        found.append(stats)
    return x, found


def _scan(
    apply: Apply, weights: list[Weights], x: jax.Array
) -> tuple[jax.Array, list[RoutingStats | None]]:
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *weights)
    x, stats = jax.lax.scan(lambda x, one: apply(one, x), x, stacked)
    return x, [jax.tree.map(lambda s, i=i: s[i], stats) for i in range(len(weights))]
