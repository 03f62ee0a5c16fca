"""The compiled programs that generate: the loops, jitted over a model's arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from dsv3_jax.attn_impl import AttnImpl
from dsv3_jax.config import ModelConfig
from dsv3_jax.generation.loop import decode, prefill
from dsv3_jax.generation.state import DecodeState
from dsv3_jax.kv_cache import PAGES, LatentKVCache
from dsv3_jax.model import DeepSeekV3
from pallas_kernels import target
from sharding import Layout, LogicalAxes

GPU_OPTIONS = {
    # Kernels that do not wait for each other's results run side by side in a CUDA graph: the shared
    # experts beside the routed ones, queries beside latents. By default all run one by one.
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}


_ROWS = ("batch",)  # what arrays of a state have first, but for counts and the cache's pages


@dataclasses.dataclass(frozen=True)
class Program:
    """A loop over a model and a state, compiled once for every shape and static argument. Donates
    the state."""

    run: Callable[..., DecodeState]
    """Of ``leaves``, a state, and the loop's arguments, of which those numbered ``static`` are."""
    leaves: list[jax.Array]
    """The model's arrays."""
    static: tuple[int, ...]
    options: dict[str, str]
    """XLA's, to compile it with."""
    layout: Layout | None
    """On which rows lie apart, those of the cache's pages too."""

    @classmethod
    def of(
        cls, model: DeepSeekV3, loop: Callable[..., DecodeState], *, static: tuple[int, ...]
    ) -> Program:
        """``static``: numbers of the loop's arguments that a program is compiled for, each."""
        # A flat list of leaves is the cheapest argument to a jitted call: 0.4 ms for 1,500 arrays
        # where a Module takes 3.7 ms.
        graph, state = nnx.split(model)
        leaves, treedef = jax.tree.flatten(state)
        layout = model.layout

        # Captures nothing that holds arrays: they must go when `leaves` are replaced.
        def run(leaves: list[jax.Array], state: DecodeState, *args: Any) -> DecodeState:
            state = loop(nnx.merge(graph, jax.tree.unflatten(treedef, leaves)), state, *args)
            return _laid_out(state, layout)

        platform = (layout and layout.platform) or target.platform()
        options = GPU_OPTIONS if platform == "gpu" else {}
        return cls(run, leaves, static, options, layout)

    @functools.cached_property
    def jitted(self) -> Any:
        return jax.jit(
            self.run,
            donate_argnums=1,
            static_argnums=self.static,
            compiler_options=self.options or None,
        )

    def lower(
        self,
        held: list[Any],
        structure: Any,
        *args: Any,
        static: tuple[Any, ...] = (),
        keep_unused: bool = False,
    ) -> jax.stages.Lowered:
        """Ahead of a run, to be compiled with ``options``: of ``leaves``, a state, and the loop's
        arguments.

        Args:
          held: the state's arrays, or ShapeDtypeStructs of them, as ``leaves`` may be.
          structure: the state's.
          static: the loop's last arguments.
          keep_unused: arrays that the loop does not read are arguments nonetheless.
        """
        rest, rest_structure = jax.tree.flatten(args)

        # Of flat lists: compiling ahead makes trees of shapes too, which state classes refuse.
        def run(leaves: list[jax.Array], held: list[Any], rest: list[Any]) -> list[jax.Array]:
            state = jax.tree.unflatten(structure, held)
            args = jax.tree.unflatten(rest_structure, rest)
            return jax.tree.leaves(self.run(leaves, state, *args, *static))

        jitted = jax.jit(run, donate_argnums=1, keep_unused=keep_unused)
        return jitted.lower(self.leaves, held, rest)

    def __call__(self, state: DecodeState, *args: Any) -> DecodeState:
        return self.jitted(self.leaves, self.laid_out(state), *args)

    def laid_out(self, state: DecodeState) -> DecodeState:
        """The state where this program wants it and leaves it."""
        return _laid_out(state, self.layout)


def _laid_out(state: DecodeState, layout: Layout | None) -> DecodeState:
    """The same whoever made it, so that a program is compiled for one."""
    if layout is None:
        return state
    leaves, structure = jax.tree.flatten(state)
    lie = jax.lax.with_sharding_constraint
    return jax.tree.unflatten(structure, map(lie, leaves, places(state, layout)))


def places(state: DecodeState, layout: Layout) -> list[NamedSharding]:
    """Where a state's arrays lie, in their order."""

    def axes(path: tuple[Any, ...]) -> LogicalAxes:
        names = {key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)}
        if "routing_counts" in names:  # of all rows together
            return ()
        return PAGES if names & {"pages", "mtp_pages"} else _ROWS

    flat, _ = jax.tree.flatten_with_path(state)
    return [layout.sharding(axes(path)[: x.ndim]) for path, x in flat]


@dataclasses.dataclass(frozen=True)
class Programs:
    """Both loops of a model, for rows of up to ``max_len`` tokens."""

    prefill: Program
    """Of a state, a number of chunks, and a drafter or None."""
    decode: Program
    """Of a state, Sampling, a number of steps, a drafter or None, and a depth."""
    graph: nnx.GraphDef[DeepSeekV3]
    """The model's modules and options, without its arrays."""
    model_config: ModelConfig
    dtype: DTypeLike
    max_len: int
    prefill_chunk: int
    layout: Layout | None
    attn_impl: AttnImpl | None
    routing_counts: np.ndarray | None
    """int64, of all batches so far: see LatentKVCache.routing_counts. Batches add to it."""
    seconds: dict[tuple[object, ...], float | None] = dataclasses.field(default_factory=dict)
    """Seconds of a step, or of a chunk, the last time each program ran, by its static arguments and
    shapes. None where that run compiled it."""

    @classmethod
    def of(
        cls,
        model: DeepSeekV3,
        max_len: int,
        *,
        prefill_chunk: int,
        vocab_size: int,
        count_routing: bool = False,
    ) -> Programs:
        """``vocab_size``: ids from here on are padding of the embedding and never chosen."""
        counted = (len(model.moe_layers()), model.config.n_routed_experts)
        return cls(
            prefill=Program.of(model, functools.partial(prefill, chunk=prefill_chunk), static=(3,)),
            decode=Program.of(
                model, functools.partial(decode, vocab_size=vocab_size), static=(4, 5)
            ),
            graph=nnx.split(model)[0],
            model_config=model.config,
            dtype=model.dtype,
            max_len=max_len,
            prefill_chunk=prefill_chunk,
            layout=model.layout,
            attn_impl=model.attn_impl,
            routing_counts=np.zeros(counted, np.int64) if count_routing else None,
        )

    @property
    def spans_processes(self) -> bool:
        """Whether the model's mesh has devices of several processes."""
        mesh = None if self.layout is None else self.layout.mesh
        return isinstance(mesh, jax.sharding.Mesh) and mesh.is_multi_process

    def use(self, model: DeepSeekV3) -> None:
        """Replaces the model's arrays from the next dispatch on; nothing is compiled. The arrays
        used so far are freed when nobody else holds them.

        Raises:
          ValueError: the model differs in its config, layout, ``attn_impl``, dtype or modules, or
            its arrays differ in number, shape, dtype or sharding.
        """
        if not isinstance(model, DeepSeekV3):
            raise ValueError(f"model: expected a DeepSeekV3, got {type(model).__name__}")
        self._check_options(model)
        graph, state = nnx.split(model)
        if graph != self.graph:
            raise ValueError(
                "model: expected the modules and options of the model in use (quantization, float8 "
                "activations, whether experts are placed), got others"
            )
        leaves = jax.tree.leaves(state)
        for program in (self.prefill, self.decode):
            before = [(x.shape, x.dtype, x.sharding) for x in program.leaves]
            if before != [(x.shape, x.dtype, x.sharding) for x in leaves]:
                raise ValueError(
                    "model: expected arrays like those of the model in use, got others"
                )
        for program in (self.prefill, self.decode):
            program.leaves[:] = leaves

    def _check_options(self, model: DeepSeekV3) -> None:
        """Names the option that differs: the graphs would differ too, but do not say where."""
        changed = [
            f"{f.name} {new!r} instead of {old!r}"
            for f in dataclasses.fields(self.model_config)
            if (new := getattr(model.config, f.name)) != (old := getattr(self.model_config, f.name))
        ]
        if changed:
            raise ValueError(
                f"model: expected the config of the model in use, got {', '.join(changed)}"
            )
        if model.layout != self.layout:
            raise ValueError("model: expected the layout of the model in use, got another")
        for name, new in (("attn_impl", model.attn_impl), ("dtype", model.dtype)):
            if new != (old := getattr(self, name)):
                raise ValueError(
                    f"model: expected the {name} of the model in use, {old}, got {new}"
                )

    def empty_state(
        self, rows: int, *, depth: int = 0, mtp: bool = False, top: int = 0
    ) -> DecodeState:
        """Rows without a token, which count as running.

        Args:
          depth: most drafts a step, for which the cache has room behind ``max_len`` tokens.
          mtp: the model's MTP layer drafts.
          top: most probable tokens kept of each place.
        """
        cache = LatentKVCache.init(
            self.model_config,
            rows,
            self.max_len + depth,
            dtype=self.dtype,
            mtp=mtp,
            count_routing=self.routing_counts is not None,
            layout=self.layout,
            attn_impl=self.attn_impl,
        )
        return DecodeState.empty(
            cache,
            self.max_len,
            depth=depth,
            feed=(depth + 1 if mtp else 0, self.model_config.hidden_size),
            dtype=self.dtype,
            top=top,
        )

    def state_shapes(self, rows: int, **kwargs: Any) -> tuple[list[jax.ShapeDtypeStruct], Any]:
        """The arrays of :meth:`empty_state` without their memory, where programs want them, and
        its structure: what :meth:`Program.lower` takes."""
        structure: Any = None
        lie: list[NamedSharding | None] = []

        def arrays() -> list[jax.Array]:
            nonlocal structure, lie
            state = self.empty_state(rows, **kwargs)
            leaves, structure = jax.tree.flatten(state)
            lie = [None] * len(leaves) if self.layout is None else [*places(state, self.layout)]
            return leaves

        shapes = jax.eval_shape(arrays)
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
            for x, at in zip(shapes, lie, strict=True)
        ], structure
