"""Functions that run decoder layers under a gradient, with recomputation or as a scan."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dsv3_jax.layers.block import DecoderLayer, LayerRunner
from dsv3_jax.layers.moe import RoutingStats
from dsv3_jax.layers.rope import Rotation
from dsv3_jax.layers.run_layer import LayerKind, split
from dsv3_jax.training.config import Remat
from pallas_kernels.residuals import ResidualName, rounded
from sharding import Layout
from sharding.fsdp import save_all_but_gathered

Weights = Any
"""The weights of one layer."""
Apply = Callable[..., tuple[jax.Array, RoutingStats | None]]
"""A layer as a function of its weights and its input."""


_SAVED: dict[str, tuple[ResidualName, ...]] = {
    "norms": ("matmul", "attention", "routes"),
    "attention+norms": ("matmul", "routes"),
    "full": (),
}
"""Results in a layer that the backward pass does not compute again, by policy."""


def layer_runner(*, remat: Remat, scan: bool) -> LayerRunner:
    """Returns a function that runs layers in order. Its results are those of
    :func:`dsv3_jax.model.run_in_order`.

    Args:
      remat: what the backward pass computes again, see
        :attr:`dsv3_jax.training.config.TrainingConfig.remat`.
      scan: stack the weights of consecutive layers of the same structure and scan over them, so
        that only one of them is compiled. The parameters themselves stay separate. Stacking costs a
        copy of the weights, in the compute dtype, and another of their gradients.
    """

    def run(
        layers: Sequence[DecoderLayer], x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], list[RoutingStats]]:
        # Without barriers, XLA would keep the residual stream in float32, and look up every angle
        # again in every layer.
        all_stats, x, rotation = [], rounded(x), jax.lax.optimization_barrier(rotation)
        for kind, group in itertools.groupby(map(split, layers), operator.itemgetter(0)):
            # With calls, XLA would gather the chosen experts of a mesh's tokens once more.
            run_layer = _apply_once if layers[0].layout is None else _apply
            apply = functools.partial(run_layer, kind, remat)
            weights = [weights for _, weights in group]
            if scan and len(weights) > 1:
                x, stats = _scan(apply, weights, x, rotation)
            else:
                x, stats = _unroll(apply, weights, x, rotation)
            all_stats += [layer_stats for layer_stats in stats if layer_stats is not None]
        return x, all_stats

    return run


def _apply(
    kind: LayerKind, remat: Remat, weights: Weights, x: jax.Array, rotation: Rotation
) -> tuple[jax.Array, RoutingStats | None]:
    layout: Layout | None = nnx.merge(kind.graph, weights).layout

    def apply(weights: Weights, x: jax.Array) -> tuple[jax.Array, RoutingStats | None]:
        x, stats = nnx.merge(kind.graph, weights)(x, rotation)
        return rounded(x), stats

    if remat != "none":
        policy = jax.checkpoint_policies.save_only_these_names(*_SAVED[remat])
        apply = jax.checkpoint(apply, policy=policy)
    elif layout is not None and layout.fsdp_axes:
        apply = jax.checkpoint(apply, policy=save_all_but_gathered)
    return apply(weights, x)


_apply_once = jax.jit(_apply, static_argnums=(0, 1))
"""Layers of the same kind are traced, differentiated and lowered once. XLA inlines the calls."""


def _unroll(
    apply: Apply, weights: list[Weights], x: jax.Array, rotation: Rotation
) -> tuple[jax.Array, list[RoutingStats | None]]:
    all_stats = []
    for layer_weights in weights:
        x, stats = apply(layer_weights, x, rotation)
        all_stats.append(stats)
    return x, all_stats


def _scan(
    apply: Apply, weights: list[Weights], x: jax.Array, rotation: Rotation
) -> tuple[jax.Array, list[RoutingStats | None]]:
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *weights)
    x, stats = jax.lax.scan(lambda x, layer_weights: apply(layer_weights, x, rotation), x, stacked)
    return x, [jax.tree.map(lambda s, i=i: s[i], stats) for i in range(len(weights))]
