"""How a training state lies on the devices of a layout, and which layouts have a gradient."""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax import nnx

from dsv3_jax.logical_axes import parameter_shardings
from dsv3_jax.model import DeepSeekV3

Tree = Any


def check_trainable(model: DeepSeekV3) -> None:
    """Raises ValueError for a model whose gradient would be wrong or not to be had where it lies:
    experts in several places, an exchange without a gradient, parameters that are not where the
    layout says."""
    if any(moe.replicas is not None for moe in model.moe_layers()):
        raise ValueError("placement: expected none to train, got experts that were placed")
    layout = model.layout
    if layout is None:
        return
    if layout.exchange_axes and model.moe_layers() and layout.exchange != "all_gather":
        raise ValueError(
            "exchange: expected all_gather to train, which alone has a gradient; got"
            f" {layout.exchange}"
        )
    lies = parameter_shardings(model, layout.mesh, layout.rules, fsdp_axes=layout.fsdp_axes)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = variable.get_value()
        if isinstance(value, jax.ShapeDtypeStruct):  # of a model to compile alone
            continue
        if not value.sharding.is_equivalent_to(lies[path], value.ndim):
            raise ValueError(
                f"{'.'.join(map(str, path))}: expected it to lie as the model's layout says,"
                f" {lies[path].spec}, got {value.sharding}; see dsv3_jax.load"
            )


def weight_shardings(model: DeepSeekV3, weights: Tree) -> Tree:
    """Of the weights of a model that is laid out, in a tree like theirs."""
    layout = model.layout
    assert layout is not None
    lies = parameter_shardings(model, layout.mesh, layout.rules, fsdp_axes=layout.fsdp_axes)
    flat = nnx.to_flat_state(weights)
    return nnx.from_flat_state([(path, leaf.replace(lies[path])) for path, leaf in flat])


def moment_shardings(
    optimizer: optax.GradientTransformation, state: Tree, params: Tree, whole: Tree
) -> Tree:
    """Of an optimiser's state: each moment as its parameter, the rest, which is small, ``whole``.

    Args:
      state: shapes are enough.
      params: the parameters' shardings.
    """
    return optax.tree_utils.tree_map_params(
        optimizer, lambda _, lies: lies, state, params, transform_non_params=lambda _: whole
    )
