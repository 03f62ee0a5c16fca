"""Pytrees that hold a model's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

Tree = Any
"""A pytree of arrays: an ``nnx.State``, or a dictionary of low-rank updates.

It is Any because beartype accepts an ``nnx.State`` neither as ``optax.Params`` nor under its own
name."""


def select(weights: Tree, is_selected: Callable[[tuple[Any, ...]], bool]) -> Tree:
    """Returns the weights at the paths that ``is_selected`` accepts."""
    flat = nnx.to_flat_state(weights)
    return nnx.from_flat_state([item for item in flat if is_selected(item[0])])


def replace(weights: Tree, others: Tree) -> Tree:
    """Returns the weights with those of ``others`` at their paths."""
    new = dict(nnx.to_flat_state(others))
    return nnx.from_flat_state(
        [(path, new.get(path, weight)) for path, weight in nnx.to_flat_state(weights)]
    )
