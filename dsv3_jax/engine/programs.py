"""The compiled programs of an engine: one for each bucket of requests and prefill chunks."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from dsv3_jax.engine.buckets import Buckets
from dsv3_jax.engine.state import SlotState
from dsv3_jax.engine.step import StepOutput, step
from dsv3_jax.engine.step_input import StepShape, empty_input
from dsv3_jax.generation.drafters import Drafter
from dsv3_jax.generation.program import GPU_OPTIONS
from dsv3_jax.generation.sampling import SamplingMode
from dsv3_jax.kv_cache import PagePool
from dsv3_jax.model import DeepSeekV3
from pallas_kernels import target

logger = logging.getLogger(__name__)

_ONE_STEP_GPU_OPTIONS = {
    # No CUDA graphs: the host would update one in every dispatch, for kernels that run once.
    "xla_gpu_enable_command_buffer": "",
}


class Programs:
    """Compiles and runs the step for every bucket.

    Args:
      buckets: the sizes to compile for.
      max_len: most tokens of a request.
      page_size: tokens of a page.
      depth: drafts per step.
    """

    def __init__(
        self,
        model: DeepSeekV3,
        buckets: Buckets,
        *,
        num_slots: int,
        max_len: int,
        page_size: int,
        drafter: Drafter | None,
        depth: int,
        vocab_size: int,
    ):
        self.buckets = buckets
        self.num_slots = num_slots
        self.compiled_after_warm_up = 0
        """Number of programs that were compiled while requests were waiting for them."""
        self._is_warm = False
        self._max_len = max_len
        self._max_pages = -(-(max_len + depth) // page_size)
        graph, model_state = nnx.split(model.precompute_for_decode())
        self._leaves, treedef = jax.tree.flatten(model_state)
        options = {"drafter": drafter, "depth": depth, "vocab_size": vocab_size}

        # Takes flat lists of arrays: they are the cheapest arguments, and lowering unflattens trees
        # into shapes, which the state classes reject when they check their types.
        def run(
            leaves: list[jax.Array],
            state_leaves: list[jax.Array],
            buffer: jax.Array,
            shape: StepShape,
            structure: Any,
        ) -> tuple[list[jax.Array], StepOutput]:
            model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
            state = jax.tree.unflatten(structure, state_leaves)
            state, output = step(model, state, buffer, shape=shape, **options)
            return jax.tree.leaves(state), output

        self._platform = (model.layout and model.layout.platform) or target.platform()
        self._jitted = jax.jit(run, donate_argnums=1, static_argnums=(3, 4))
        self._compiled: dict[StepShape, Any] = {}

    def shape(
        self,
        decodes: int,
        chunks: int,
        *,
        context: int = 0,
        steps: int = 1,
        sampling: SamplingMode = "greedy",
        num_top_logprobs: int = 0,
    ) -> StepShape:
        """Returns the smallest shape that holds a step, see :meth:`Buckets.shape`."""
        return self.buckets.shape(
            decodes,
            chunks,
            max_len=self._max_len,
            max_pages=self._max_pages,
            context=context,
            steps=steps,
            sampling=sampling,
            num_top_logprobs=num_top_logprobs,
        )

    @property
    def shapes(self) -> list[StepShape]:
        """Every shape that a step without top log-probabilities can have."""
        return self.buckets.shapes(max_len=self._max_len, max_pages=self._max_pages)

    def warm_up(self, state: SlotState, shapes: Sequence[StepShape] | None = None) -> None:
        """Compiles programs in parallel: those of ``shapes``, or all."""
        missing = [s for s in shapes or self.shapes if s not in self._compiled]
        # Lowering is Python and runs in one thread, while others compile.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compiling = {s: pool.submit(self.compile, self.lower(state, s), s) for s in missing}
            self._compiled |= {shape: done.result() for shape, done in compiling.items()}
        self._is_warm = self._is_warm or shapes is None

    def __call__(
        self, state: SlotState, buffer: np.ndarray, shape: StepShape
    ) -> tuple[SlotState, StepOutput]:
        """Dispatches a step. The state is donated."""
        compiled = self._compiled.get(shape)
        if compiled is None:
            if self._is_warm:
                self.compiled_after_warm_up += 1
                logger.warning("compiling a step after warm-up: %s", shape)
            compiled = self._compiled[shape] = self.compile(self.lower(state, shape), shape)
        leaves, structure = jax.tree.flatten(state)
        leaves, output = compiled(self._leaves, leaves, jax.device_put(buffer))
        return jax.tree.unflatten(structure, leaves), output

    def lower(self, state: SlotState, shape: StepShape) -> jax.stages.Lowered:
        """Lowers the program of a shape."""
        buffer, _ = empty_input(shape, self.num_slots)
        leaves, structure = jax.tree.flatten(state)
        return self._jitted.lower(self._leaves, leaves, buffer, shape, structure)

    def compile(self, lowered: jax.stages.Lowered, shape: StepShape) -> jax.stages.Compiled:
        """Compiles the lowered program of a shape."""
        if self._platform != "gpu":
            return lowered.compile()
        options = GPU_OPTIONS if shape.max_steps > 1 else _ONE_STEP_GPU_OPTIONS
        return lowered.compile({**options})


def empty_pool(model: DeepSeekV3, num_pages: int, page_size: int, *, mtp: bool) -> PagePool:
    """Returns the page arrays of an engine."""
    return PagePool.empty(
        model.cache_spec(mtp=mtp), num_pages, page_size=page_size, layout=model.layout
    )
