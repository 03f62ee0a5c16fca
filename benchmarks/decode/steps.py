"""Times decode steps and prefills of the Generator's and Engine's programs, on synthetic states."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.decode import random_cache
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.device.page_pool import PoolLayout
from dsv3_jax.engine.device.programs import Programs
from dsv3_jax.engine.device.state import SlotState, shard_state
from dsv3_jax.engine.device.step_input import StepInput, StepShape, empty_input
from dsv3_jax.generation.completion import RUNNING
from dsv3_jax.generation.drafters import Drafter, DraftPlan
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.layers.paged_cache import Form
from dsv3_jax.model import DeepSeekV3

SHORT, LONG = 4, 24  # steps of the two dispatches whose difference is the measured time
WINDOWS = 5


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program that is compiled ahead of time for one shape."""

    executable: Any
    leaves: list[jax.Array]
    structure: Any
    """Tree structure of the state."""
    compile_s: float
    argument_bytes: int
    """Bytes of the model's weights and the state."""
    workspace_bytes: int
    """Bytes of temporary arrays and of results that do not alias the state."""

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.workspace_bytes

    @classmethod
    def of(
        cls,
        programs: Programs,
        shape: StepShape,
        num_pages: int,
        options: Mapping[str, Any] | None = None,
    ) -> Compiled:
        """Compiles a program without allocating its state, so that autotuning has more memory.

        Args:
          num_pages: pages of the state's cache.
          options: compiler options in addition to the program's own.
        """
        began = time.perf_counter()
        state_leaves, structure = programs.state_shapes(num_pages)
        lowered = programs.lower(state_leaves, structure, shape)
        executable = programs.compile(lowered, shape, options)
        elapsed = time.perf_counter() - began
        memory: Any = executable.memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        workspace = memory.temp_size_in_bytes + results
        arguments = memory.argument_size_in_bytes
        return cls(executable, programs.leaves, structure, elapsed, arguments, workspace)

    def __call__(
        self, state: SlotState, buffers: Sequence[jax.Array]
    ) -> tuple[SlotState, list[Any], float]:
        """Runs the program with each of these arguments. Returns the new state, the outputs, and
        the seconds that it took."""
        leaves, outputs = jax.tree.leaves(state), []
        began = time.perf_counter()
        for buffer in buffers:
            leaves, output = self.executable(self.leaves, leaves, buffer)
            outputs.append(output)
        jax.block_until_ready((leaves, outputs))
        elapsed = time.perf_counter() - began
        return jax.tree.unflatten(self.structure, leaves), outputs, elapsed


class Slots:
    """Programs for ``rows`` requests, which all run, and the pages of each.

    Args:
      longest: most tokens of a request.
      chunk: tokens of each request in a forward pass that prefills.
      chunk_form: form of the chunks' attention, by default an engine's on this device.
    """

    def __init__(
        self,
        model: DeepSeekV3,
        rows: int,
        longest: int,
        drafter: Drafter | None = None,
        depth: int = 0,
        chunk: int = 1,
        chunk_form: Form | None = None,
    ):
        layout = model.layout
        default = Buckets.of_devices(rows, layout)
        self._config = model.config
        one_page = PoolLayout.of(layout, 1, DEFAULT_PAGE_SIZE)
        local_rows = rows // one_page.shards
        # In absorbed form, chunks have the engine's length, and several are of the same prompt.
        chunk_form = chunk_form or default.chunk_form
        is_absorbed = chunk_form == "absorbed"
        chunk_tokens = min(chunk, default.chunk_tokens) if is_absorbed else chunk
        self.programs = Programs(
            model,
            dataclasses.replace(
                default,
                decodes=(local_rows,),
                chunks=(local_rows * -(-chunk // chunk_tokens),),
                chunk_tokens=chunk_tokens,
                chunk_form=chunk_form,
                max_steps=LONG,
                multi_step_decodes=None,
                separate=True,
            ),
            DraftPlan(drafter, (depth,)),
            num_slots=rows,
            max_len=-(-longest // DEFAULT_PAGE_SIZE) * DEFAULT_PAGE_SIZE,
            page_size=DEFAULT_PAGE_SIZE,
            vocab_size=model.config.vocab_size,
        )
        self._local_rows = local_rows
        self._pages_each = self.programs.max_pages // one_page.token_parts
        self._pool = dataclasses.replace(one_page, pages_per_device=local_rows * self._pages_each)

    @property
    def num_pages(self) -> int:
        """Pages of all requests."""
        return self._pool.num_pages

    def inputs(self, shape: StepShape) -> tuple[np.ndarray, list[StepInput]]:
        """Returns a buffer, and the arguments of each shard, whose requests all decode if the shape
        has decodes."""
        buffer, inputs = empty_input(shape, self._local_rows)
        for shard, arguments in enumerate(inputs):
            arrays: Any = arguments  # NumPy's, on the host
            self._pool.fill_tables(arrays.decode_tables, shard, self.pages(shard)[: shape.decodes])
            arrays.decode_slots[:] = range(shape.decodes)
            arrays.max_drafts[:] = shape.depth
        return buffer, inputs

    def pages(self, shard: int) -> list[list[int]]:
        """Returns the pages of each request of a shard."""
        per_shard = self._pool.token_parts * self._pool.pages_per_device
        first = shard * per_shard
        each = self._pages_each
        return [[*range(first + i * each, first + (i + 1) * each)] for i in range(self._local_rows)]

    def fill_chunks(
        self, arguments: StepInput, shard: int, begin: int, end: int, chunk_tokens: int
    ) -> None:
        """Makes a step prefill the tokens from ``begin`` to ``end`` of every request."""
        arrays: Any = arguments
        starts = range(begin, end, chunk_tokens)
        pages = [each for each in self.pages(shard) for _ in starts]
        self._pool.fill_tables(arrays.chunk_tables, shard, pages)
        for i in range(len(pages)):
            start = starts[i % len(starts)]
            arrays.chunk_slots[i] = i // len(starts)
            arrays.starts[i] = start
            arrays.counts[i] = min(chunk_tokens, end - start)

    def state(self, cached: int) -> SlotState:
        """Returns a state with random tokens, ``cached`` of each request in the cache."""
        state = self.programs.empty_state(self.num_pages)
        vocab_size = self.programs.vocab_size
        tokens = np.random.default_rng(0).integers(0, vocab_size, state.tokens.shape, np.int32)
        mtp_inputs = jax.random.normal(
            jax.random.key(1), state.mtp_inputs.shape, state.mtp_inputs.dtype
        )
        rows = len(state.lengths)
        # The seeds determine which synthetic drafts are accepted.
        sampling = dataclasses.replace(state.sampling, seed=jnp.arange(rows, dtype=jnp.uint32))
        state = dataclasses.replace(
            state,
            pool=random_cache.fill(state.pool, self._config),
            tokens=jnp.asarray(tokens),
            limits=jnp.full(rows, state.tokens.shape[1], jnp.int32),
            mtp_inputs=mtp_inputs,
            sampling=sampling,
        )
        return self.before_first_step(state, cached)

    def before_first_step(self, state: SlotState, cached: int) -> SlotState:
        """Returns the state before the first step: ``cached`` tokens of each request, and one."""
        rows = len(state.lengths)
        state = dataclasses.replace(
            state,
            lengths=jnp.full(rows, cached + 1, jnp.int32),
            finished=jnp.full(rows, RUNNING, jnp.int32),
            num_mtp_inputs=jnp.full(rows, min(1, state.mtp_inputs.shape[1]), jnp.int32),
        )
        return shard_state(state, self.programs.layout)


class Decode:
    """Greedy decoding of ``rows`` sequences with up to ``longest`` random cached tokens each."""

    def __init__(
        self,
        model: DeepSeekV3,
        rows: int,
        longest: int,
        drafter: Drafter | None = None,
        depth: int = 0,
    ):
        self.longest = longest
        self._slots, self._shape = _decoding(model, rows, longest, drafter, depth)
        self._buffer, self._inputs = self._slots.inputs(self._shape)
        self.compiled = self.compile()
        self.state = self._slots.state(longest)

    def compile(self, options: Mapping[str, Any] | None = None) -> Compiled:
        return Compiled.of(self._slots.programs, self._shape, self._slots.num_pages, options)

    def dispatch(self, steps: int, cached: int, compiled: Compiled | None = None) -> float:
        """Runs ``steps`` steps after ``cached`` tokens per sequence. Returns the seconds."""
        for arguments in self._inputs:
            arrays: Any = arguments
            arrays.steps[0] = steps
        buffer = self._slots.programs.on_device(self._buffer)
        state = self._slots.before_first_step(self.state, cached)
        self.state, (output,), elapsed = (compiled or self.compiled)(state, [buffer])
        counts = np.asarray(output.counts)
        taken = int((counts > 0).any(axis=1).sum())
        assert taken == steps, f"expected {steps} steps, got {taken}"
        self.tokens = int(counts.sum())
        return elapsed

    def measure(self, cached: int) -> dict[str, float]:
        """Measures milliseconds per step and tokens per second."""
        self.dispatch(SHORT, cached)
        self.dispatch(LONG, cached)
        windows, tokens = [], []
        for _ in range(WINDOWS):
            short, few_tokens = self.dispatch(SHORT, cached), self.tokens
            windows.append((self.dispatch(LONG, cached) - short) / (LONG - SHORT))
            tokens.append((self.tokens - few_tokens) / (LONG - SHORT))
        step = statistics.median(windows)
        return {
            "ms": 1e3 * step,
            "tokens_per_s": statistics.median(tokens) / step,
            "spread": (max(windows) - min(windows)) / step,
        }


def _decoding(
    model: DeepSeekV3, rows: int, longest: int, drafter: Drafter | None, depth: int
) -> tuple[Slots, StepShape]:
    slots = Slots(model, rows, longest + 1 + LONG * (depth + 1), drafter, depth)
    return slots, slots.programs.shape(slots.programs.slots_per_shard, 0)


class Prefill:
    """Prefill of ``rows`` prompts of ``tokens`` random tokens each, in forward passes of ``chunk``
    tokens of every prompt. No token is sampled."""

    def __init__(
        self, model: DeepSeekV3, rows: int, tokens: int, chunk: int, chunk_form: Form | None = None
    ):
        self._rows, self._tokens = rows, tokens
        self._slots = Slots(model, rows, tokens + 1, chunk=chunk, chunk_form=chunk_form)
        programs = self._slots.programs
        shape = programs.shape(0, 1)
        self.chunk_form = shape.chunk_form
        self._buffers = []
        for begin in range(0, tokens, chunk):
            buffer, inputs = self._slots.inputs(shape)
            for shard, arguments in enumerate(inputs):
                end = min(begin + chunk, tokens)
                self._slots.fill_chunks(arguments, shard, begin, end, shape.chunk_tokens)
            self._buffers.append(programs.on_device(buffer))
        self.compiled = Compiled.of(programs, shape, self._slots.num_pages)
        self.state = self._slots.state(tokens)

    def measure(self) -> dict[str, float]:
        def run() -> float:
            self.state, _, elapsed = self.compiled(self.state, self._buffers)
            return elapsed

        run()
        windows = [run() for _ in range(WINDOWS)]
        elapsed = statistics.median(windows)
        return {
            "ms": 1e3 * elapsed,
            "tokens_per_s": self._rows * self._tokens / elapsed,
            "spread": (max(windows) - min(windows)) / elapsed,
        }
