"""A decoding loop, jitted over the arrays of a model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import NamedSharding

from dsv3_jax.generation.state import DecodeState
from dsv3_jax.layers.paged_cache import PAGE_AXES
from dsv3_jax.model import DeepSeekV3
from pallas_kernels import target
from sharding import Layout, LogicalAxes

_State = TypeVar("_State")

GPU_OPTIONS = {
    # Runs independent kernels of a CUDA graph concurrently: the shared experts with the routed
    # ones, queries with latents. By default they run one after the other.
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}
"""XLA compiler options of programs for GPUs."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted decoding loop. It compiles once per combination of shapes and static arguments, and
    donates the state."""

    function: Callable[..., DecodeState]
    """The function that is jitted: ``(leaves, state, *loop_args) -> state``."""

    leaves: list[jax.Array]
    """The model's arrays in flattening order. Replaced in place by :meth:`Programs.use`."""

    static: tuple[int, ...]
    """Positions of the static arguments in the signature of ``function``."""

    options: dict[str, str]
    """XLA compiler options."""

    layout: Layout | None
    """Mesh layout that shards the batch dimension of the state and of the cache pages, or None."""

    @classmethod
    def of(
        cls, model: DeepSeekV3, loop: Callable[..., DecodeState], *, static: tuple[int, ...]
    ) -> Program:
        """Creates the program of ``loop``, a function ``(model, state, *loop_args) -> state``.

        Args:
          static: positions of the loop's static arguments, counted from ``model`` = 0.
        """
        # A flat list of arrays is the cheapest argument to a jitted call: 0.4 ms for 1,500 arrays,
        # against 3.7 ms for a Module.
        graph, model_state = nnx.split(model)
        leaves, treedef = jax.tree.flatten(model_state)
        layout = model.layout

        # The closure contains no arrays, so that replacing `leaves` frees those of the old model.
        def run(leaves: list[jax.Array], state: DecodeState, *loop_args: Any) -> DecodeState:
            model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
            return shard_state(loop(model, state, *loop_args), layout)

        platform = (layout and layout.platform) or target.platform()
        return cls(run, leaves, static, GPU_OPTIONS if platform == "gpu" else {}, layout)

    @functools.cached_property
    def jitted(self) -> Any:
        """``function`` under ``jax.jit``."""
        return jax.jit(
            self.function,
            donate_argnums=1,
            static_argnums=self.static,
            compiler_options=self.options or None,
        )

    def __call__(self, state: DecodeState, *loop_args: Any) -> DecodeState:
        """Runs the loop. The arrays of ``state`` are donated."""
        return self.jitted(self.leaves, self.shard(state), *loop_args)

    def shard(self, state: DecodeState) -> DecodeState:
        """Moves a state to the shardings with which the program takes and returns it."""
        return shard_state(state, self.layout)

    def lower(
        self,
        state_leaves: list[Any],
        structure: Any,
        *args: Any,
        static: tuple[Any, ...] = (),
        keep_unused: bool = False,
    ) -> jax.stages.Lowered:
        """Lowers the program for compilation ahead of time. Pass ``options`` to ``compile``.

        The lowered function is ``(leaves, state_leaves, arg_leaves) -> state_leaves``.

        Args:
          state_leaves: arrays of the state in flattening order, or their ShapeDtypeStructs.
          structure: tree structure of the state.
          args: the loop's dynamic arguments.
          static: the loop's static arguments, which come last.
          keep_unused: keep arrays that the loop does not read as arguments of the program.
        """
        arg_leaves, arg_structure = jax.tree.flatten(args)

        # Takes flat lists, because lowering also unflattens trees into shapes, which the state
        # classes reject when they check their types.
        def run(
            leaves: list[jax.Array], state_leaves: list[Any], arg_leaves: list[Any]
        ) -> list[jax.Array]:
            state = jax.tree.unflatten(structure, state_leaves)
            args = jax.tree.unflatten(arg_structure, arg_leaves)
            return jax.tree.leaves(self.function(leaves, state, *args, *static))

        jitted = jax.jit(run, donate_argnums=1, keep_unused=keep_unused)
        return jitted.lower(self.leaves, state_leaves, arg_leaves)


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
