"""Runs a list of decoder layers on whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jaxtyping import Array, Float

from dsv3_jax.layers.block import DecoderLayer
from dsv3_jax.layers.moe import RoutingStats
from dsv3_jax.layers.rope import Rotation

LayerRunner = Callable[
    [Sequence[DecoderLayer], jax.Array, Rotation], tuple[jax.Array, list[RoutingStats]]
]
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
