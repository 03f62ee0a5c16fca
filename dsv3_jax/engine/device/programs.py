"""The compiled programs of an engine: one for each bucket of requests and prefill chunks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv3_jax import compile_cache
from dsv3_jax.compile_cache import CompileProgress
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.device.model_arrays import ModelArrays
from dsv3_jax.engine.device.processes import spans_processes
from dsv3_jax.engine.device.program_store import ProgramStore, environment
from dsv3_jax.engine.device.state import SlotState, shard_state, state_shardings
from dsv3_jax.engine.device.step import StepOutput, step
from dsv3_jax.engine.device.step_input import GREEDY, StepOptions, StepShape, empty_input
from dsv3_jax.engine.stats import CompileTimes
from dsv3_jax.generation.drafters import DraftPlan
from dsv3_jax.generation.request import num_words
from dsv3_jax.kv_cache import PagePool
from dsv3_jax.model import DeepSeekV3
from pallas_kernels import target

logger = logging.getLogger(__name__)

GPU_OPTIONS = {
    # Runs independent kernels of a CUDA graph concurrently: the shared experts with the routed
    # ones, queries with latents. By default they run one after the other.
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
}
"""XLA compiler options of programs for GPUs that loop over decode steps."""

_ONE_STEP_GPU_OPTIONS = {
    # No CUDA graphs: the host would update one in every dispatch, for kernels that run once.
    "xla_gpu_enable_command_buffer": "",
}


class Programs:
    """Compiles and runs the step for every bucket.

    Args:
      model: the model. Shapes in place of its arrays are enough to lower programs.
      num_slots: number of slots of all shards.
      arrays: those of the model, if another object has prepared them.
    """

    def __init__(
        self,
        model: DeepSeekV3,
        buckets: Buckets,
        draft_plan: DraftPlan,
        *,
        num_slots: int,
        max_len: int,
        page_size: int,
        vocab_size: int,
        count_routing: bool = False,
        arrays: ModelArrays | None = None,
    ):
        self.buckets = buckets
        self.num_slots = num_slots
        self.on_launch: Callable[[np.ndarray, StepShape], object] | None = None
        """Is called before each step with its arguments, in the thread that launches it, and before
        the step's program is compiled, so that followers compile at the same time."""
        self.compilations = CompileTimes()
        """Compilations that steps wait for."""
        self.compiled_after_warm_up = 0
        """Number of programs that were compiled while requests were waiting for them."""
        self._is_warm = False
        self.vocab_size = vocab_size
        """Number of token ids that a step can select."""
        depth = self._depth = draft_plan.max_depth
        parts = 1 if model.layout is None else model.layout.num_shards("cached_tokens")
        self.max_pages = -(-(max_len + depth) // (page_size * parts)) * parts
        """Pages of the longest request, on all devices that share its tokens."""
        self.page_size = page_size
        self._num_mtp_inputs = depth + 1 if draft_plan.mtp else 0
        self._cache_spec = model.cache_spec(mtp=draft_plan.mtp)
        shape = len(model.moe_layers()), model.config.n_routed_experts
        self._counts_shape = shape if count_routing else None
        self._hidden_size, self._dtype = model.config.hidden_size, model.dtype
        layout = self.layout = model.layout
        shards = self._shards = 1 if layout is None else layout.num_shards("batch")
        self._sizes = {
            "max_len": max_len,
            "max_pages": self.max_pages,
            "shards": shards,
            "mask_words": num_words(model.config.vocab_size),
        }
        if layout is None:
            self._buffer_sharding = None
        else:
            self._buffer_sharding = layout.sharding(("batch",) if shards > 1 else ())
        arrays = arrays or ModelArrays.of(model, whole_sequences=buckets.single_shape)
        # The size of the cache depends on the memory that they leave.
        self.leaves = jax.block_until_ready(arrays.leaves)
        """The model's arrays in flattening order: the first argument of every program. They may be
        replaced by :meth:`arrays_of` another model of the same signature."""
        # The model's attributes are in its repr; its arrays are arguments, whose shapes count.
        self._fingerprint = {
            "model": f"{model.config} {arrays.graph} {arrays.treedef}",
            "layout": repr(layout),
            "buckets": repr(buckets),
            "drafter": f"{draft_plan.drafter!r} {depth} {vocab_size}",
            "sizes": f"{num_slots} {max_len} {page_size}",
        }
        self._without_arrays = dataclasses.replace(arrays, leaves=[])
        self._step_options = {"drafter": draft_plan.drafter, "vocab_size": vocab_size}
        self.platform = (layout and layout.platform) or target.platform()
        self._compiled: dict[StepShape, Any] = {}

    def arrays_of(self, model: DeepSeekV3) -> list[jax.Array]:
        """Returns a model's arrays, those that decode precomputes included."""
        arrays = ModelArrays.of(model, whole_sequences=self.buckets.single_shape)
        return jax.block_until_ready(arrays.leaves)

    def shape(
        self, decodes: int, chunks: int, options: StepOptions = GREEDY, *, depth: int | None = None
    ) -> StepShape:
        """Returns the smallest shape that holds a step. ``depth``: drafts, or None for the most."""
        depth = self._depth if depth is None else depth
        return self.buckets.shape(decodes, chunks, options, depth=depth, **self._sizes)

    @property
    def slots_per_shard(self) -> int:
        """Number of slots of each shard."""
        return self.num_slots // self._shards

    @property
    def shapes(self) -> list[StepShape]:
        """Every shape of a step whose requests ask for no more than sampling."""
        if self.buckets.single_shape:
            return [self.shape(0, 0)]
        return self.buckets.shapes(depth=self._depth, **self._sizes)

    def warm_up(
        self,
        state: SlotState,
        shapes: Sequence[StepShape] | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        """Compiles programs in parallel: those of ``shapes``, or all. With a ``directory``, they
        are loaded from it instead, or stored there, see :class:`ProgramStore`."""
        missing = [s for s in shapes or self.shapes if s not in self._compiled]
        # The largest programs compile longest, so that none of them is left alone at the end.
        missing.sort(key=lambda s: s.decodes + s.chunks * s.chunk_tokens, reverse=True)
        store = None if directory is None else self._store(state, directory)
        with contextlib.ExitStack() as until_compiled:
            if store is not None and self.platform == "cpu":
                # Otherwise nothing could be stored, see ProgramStore.save.
                until_compiled.enter_context(compile_cache.disabled())
            # Lowering is Python and runs in one thread, while others compile.
            pool = until_compiled.enter_context(
                concurrent.futures.ThreadPoolExecutor(initializer=_yield_to_other_threads)
            )
            if store is not None:
                loading = {s: pool.submit(store.load, _name(s), repr(s)) for s in missing}
                loaded = {s: program for s in missing if (program := loading[s].result())}
                self._compiled |= loaded
                logger.info("loaded %d of %d programs", len(loaded), len(missing))
                missing = [s for s in missing if s not in loaded]
            began = time.perf_counter()
            compiling: dict[StepShape, concurrent.futures.Future[jax.stages.Compiled]] = {}
            if missing:
                progress = until_compiled.enter_context(CompileProgress(len(missing)))
                for s in missing:
                    lowering = self._lower(state, s)
                    compiling[s] = pool.submit(self._compile_and_store, lowering, s, store)
                    compiling[s].add_done_callback(progress.advance)
            lowered = time.perf_counter()
            self._compiled |= {shape: done.result() for shape, done in compiling.items()}
        if missing:
            logger.info(
                "lowered %d programs in %.1f s, compiled the last ones %.1f s later",
                len(missing),
                lowered - began,
                time.perf_counter() - lowered,
            )
        self._is_warm = self._is_warm or shapes is None

    def __call__(
        self, state: SlotState, buffer: np.ndarray, shape: StepShape
    ) -> tuple[SlotState, StepOutput]:
        """Dispatches a step. The state is donated."""
        if self.on_launch is not None:
            self.on_launch(buffer, shape)
        compiled = self._compiled.get(shape)
        if compiled is None:
            compiled = self._compiled[shape] = self._compile_now(state, shape)
        leaves, structure = jax.tree.flatten(state)
        device_buffer = self.on_device(buffer)
        leaves, output = compiled(self.leaves, leaves, device_buffer)
        if self.platform == "cpu" and spans_processes(self.layout):
            # XLA's CPU client launches and runs programs on one small thread pool, where the
            # collectives of several at a time can block each other.
            jax.block_until_ready(output)
        return jax.tree.unflatten(structure, leaves), output

    def _compile_now(self, state: SlotState, shape: StepShape) -> jax.stages.Compiled:
        """Compiles a program that a step waits for."""
        if self._is_warm:
            self.compiled_after_warm_up += 1
            logger.warning("compiling a step after warm-up, while all requests wait: %s", shape)
        began = time.perf_counter()
        with self.compilations.measure(shape.name), CompileProgress(1):
            compiled = self.compile(self._lower(state, shape), shape)
        if self._is_warm:
            seconds = time.perf_counter() - began
            logger.warning("compiled a step after warm-up in %.1f s: %s", seconds, shape)
        return compiled

    def on_device(self, buffer: np.ndarray) -> jax.Array:
        """Transfers the arguments of a step, see :func:`empty_input`, to the devices."""
        sharding = self._buffer_sharding
        if sharding is None or sharding.is_fully_addressable:
            return jax.device_put(buffer, sharding)
        # Every process has the whole buffer. device_put would compare it between them first.
        return jax.make_array_from_callback(buffer.shape, sharding, buffer.__getitem__)

    def empty_state(self, num_pages: int) -> SlotState:
        """Creates the state that the programs take: empty slots, and a pool of ``num_pages``."""
        state = SlotState.empty(
            PagePool.empty(
                self._cache_spec, num_pages, page_size=self.page_size, layout=self.layout
            ),
            self.num_slots,
            self._sizes["max_len"],
            mtp_inputs=(self._num_mtp_inputs, self._hidden_size),
            dtype=self._dtype,
            routing_counts=None
            if self._counts_shape is None
            else jnp.zeros(self._counts_shape, jnp.int32),
        )
        return shard_state(state, self.layout)

    def new_state(self, num_pages: int) -> SlotState:
        """Returns :meth:`empty_state`, on a mesh of several processes too."""
        if not spans_processes(self.layout):
            return self.empty_state(num_pages)
        shapes, structure = self.state_shapes(num_pages)
        shardings = [shape.sharding for shape in shapes]
        make = jax.jit(
            lambda: jax.tree.leaves(self.empty_state(num_pages)), out_shardings=shardings
        )
        return jax.tree.unflatten(structure, make())

    def state_shapes(self, num_pages: int) -> tuple[list[jax.ShapeDtypeStruct], Any]:
        """Returns shape, dtype and sharding of each array of :meth:`empty_state`, and the state's
        tree structure, without allocating memory. :meth:`lower` takes both."""
        structure: Any = None
        shardings: list[Any] = []

        # The state is flattened inside, because its class rejects shapes in place of arrays.
        def leaves() -> list[jax.Array]:
            nonlocal structure, shardings
            state = self.empty_state(num_pages)
            leaves, structure = jax.tree.flatten(state)
            layout = self.layout
            shardings = [None] * len(leaves) if layout is None else state_shardings(state, layout)
            return leaves

        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for x, sharding in zip(jax.eval_shape(leaves), shardings, strict=True)
        ]
        return shapes, structure

    def lower(
        self,
        state_leaves: Sequence[jax.Array | jax.ShapeDtypeStruct],
        structure: Any,
        shape: StepShape,
        *,
        keep_unused: bool = False,
    ) -> jax.stages.Lowered:
        """Lowers the program of a shape, for the state of :meth:`state_shapes` or its arrays. With
        ``keep_unused``, arrays that the step does not read stay arguments of the program."""
        options: dict[str, Any] = {"keep_unused": keep_unused}
        if self.layout is not None:
            # The state comes out as it went in, so that the next step can take it. Results are on
            # every device: the host reads them from one instead of a part from each.
            shardings = [leaf.sharding for leaf in state_leaves]
            options["out_shardings"] = shardings, self.layout.sharding(())
        buffer, _ = empty_input(shape, self.slots_per_shard)
        buffer_shape = jax.ShapeDtypeStruct(
            buffer.shape, buffer.dtype, sharding=self._buffer_sharding
        )

        jitted = jax.jit(self._program(shape, structure), donate_argnums=1, **options)
        return jitted.lower(self.leaves, list(state_leaves), buffer_shape)

    def _program(self, shape: StepShape, structure: Any) -> Callable[..., Any]:
        """Returns the step of a shape as a function of flat lists of arrays: they are the cheapest
        arguments, and lowering unflattens trees into shapes, which the state classes reject when
        they check their types."""
        arrays, options = self._without_arrays, self._step_options  # the closure keeps no arrays

        def program(
            leaves: list[jax.Array], state_leaves: list[jax.Array], buffer: jax.Array
        ) -> tuple[list[jax.Array], StepOutput]:
            model, state = arrays.model(leaves), jax.tree.unflatten(structure, state_leaves)
            state, output = step(model, state, buffer, shape=shape, **options)
            return jax.tree.leaves(state), output

        program.__name__ = _name(shape)  # in profiles
        return program

    def _lower(self, state: SlotState, shape: StepShape) -> jax.stages.Lowered:
        return self.lower(*jax.tree.flatten(state), shape)

    def _store(self, state: SlotState, directory: str | os.PathLike[str]) -> ProgramStore:
        """Returns the store of programs that take this state."""
        if self.layout is None:
            # On their default device, all arrays have one device.
            devices = list(self.leaves[0].devices())
        else:
            devices = list(np.ravel(np.asarray(self.layout.mesh.devices)))
        leaves = [*self.leaves, *jax.tree.leaves(state)]
        arguments = [f"{x.shape} {x.dtype} {x.sharding}" for x in leaves]
        fingerprint = {**environment(devices), **self._fingerprint, "arguments": str(arguments)}
        return ProgramStore(directory, fingerprint, devices)

    def _compile_and_store(
        self, lowered: jax.stages.Lowered, shape: StepShape, store: ProgramStore | None
    ) -> jax.stages.Compiled:
        compiled = self.compile(lowered, shape)
        if store is not None:
            store.save(_name(shape), repr(shape), compiled)
        return compiled

    def compile(
        self,
        lowered: jax.stages.Lowered,
        shape: StepShape,
        options: Mapping[str, Any] | None = None,
    ) -> jax.stages.Compiled:
        """Compiles a lowered program, with ``options`` in addition to those of the platform."""
        own: dict[str, Any] = {}
        if self.platform == "gpu":
            own = GPU_OPTIONS if shape.max_steps > 1 else _ONE_STEP_GPU_OPTIONS
        return lowered.compile({**own, **(options or {})} or None)


def _name(shape: StepShape) -> str:
    """Returns the name of a program."""
    return "step_" + re.sub(r"\W+", "_", shape.name)


def _yield_to_other_threads() -> None:
    """Lowers the priority of a thread that compiles, so that it takes no CPU time from the one that
    lowers. Without this, lowering takes twice as long, and every program waits for it."""
    if sys.platform == "linux":  # elsewhere the priority is that of the whole process
        os.nice(10)
