"""Shardings of the training state on the mesh of a model's layout."""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax import nnx

from dsv3_jax.layers.logical_axes import parameter_shardings
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training.state import TrainingState
from dsv3_jax.training.tree import Tree
from sharding import Layout


def weight_shardings(model: DeepSeekV3, layout: Layout, weights: Tree) -> Tree:
    """Returns the sharding of each weight of ``model``, in a tree with the structure of
    ``weights``."""
    shardings = parameter_shardings(model, layout.mesh, layout.rules, fsdp_axes=layout.fsdp_axes)
    flat = nnx.to_flat_state(weights)
    return nnx.from_flat_state([(path, leaf.replace(shardings[path])) for path, leaf in flat])


def state_shardings(
    shapes: TrainingState,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    params: Tree | None,
) -> TrainingState:
    """Returns the sharding of each array in a training state.

    Each moment has the sharding of its parameter. Router biases and counters, which are small, are
    replicated.

    Args:
      shapes: abstract state.
      params: shardings of the trained parameters. None replicates them, which is meant for low-rank
        updates: they are small.
    """
    replicated: Any = layout.sharding(())
    param_shardings: Any = params
    if params is None:
        param_shardings = jax.tree.map(lambda _: replicated, shapes.params)
    moments = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        shapes.optimizer,
        param_shardings,
        transform_non_params=lambda _: replicated,
    )
    biases = jax.tree.map(lambda _: replicated, shapes.biases)
    return TrainingState(param_shardings, biases, moments, replicated)
