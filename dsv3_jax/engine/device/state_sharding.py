"""Shardings of a state: a dataclass of arrays that a compiled program takes and returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding

from dsv3_jax.layers.paged_cache import PAGE_AXES
from sharding import Layout, LogicalAxes

_State = TypeVar("_State")


def shard_state(state: _State, layout: Layout | None) -> _State:
    """Constrains every array of a state to its sharding, inside or outside of ``jax.jit``.

    A program compiles once per sharding of its arguments. With this function it gets the same
    shardings from the code that creates a state and from its own previous dispatch.
    """
    if layout is None:
        return state
    leaves, structure = jax.tree.flatten(state)
    shardings = state_shardings(state, layout)
    return jax.tree.unflatten(structure, map(jax.lax.with_sharding_constraint, leaves, shardings))


def state_shardings(state: Any, layout: Layout) -> list[NamedSharding]:
    """Returns the sharding of each array of the state, in flattening order.

    A state is a dataclass whose arrays have a row for each sequence, except the page arrays of its
    ``pool`` and ``routing_counts``.
    """

    def axes(path: tuple[Any, ...]) -> LogicalAxes:
        names = {key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)}
        if "routing_counts" in names:  # summed over all sequences
            return ()
        return PAGE_AXES if "pool" in names else ("batch",)

    paths_and_leaves, _ = jax.tree.flatten_with_path(state)
    return [layout.sharding(axes(path)[: leaf.ndim]) for path, leaf in paths_and_leaves]


def state_shapes(
    empty_state: Callable[[], Any], layout: Layout | None
) -> tuple[list[jax.ShapeDtypeStruct], Any]:
    """Returns shape, dtype and sharding of each array of a new state, and its tree structure.

    ``empty_state`` creates the state. It is traced, so that no memory is allocated.
    """
    structure: Any = None
    shardings: list[Any] = []

    # The state is flattened inside, because its class rejects shapes in place of arrays.
    def leaves() -> list[jax.Array]:
        nonlocal structure, shardings
        state = empty_state()
        leaves, structure = jax.tree.flatten(state)
        shardings = [None] * len(leaves) if layout is None else state_shardings(state, layout)
        return leaves

    shapes = jax.eval_shape(leaves)
    return [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for x, sharding in zip(shapes, shardings, strict=True)
    ], structure
