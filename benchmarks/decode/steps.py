"""Times decode steps and prefills of the generator's own programs, on a synthetic state."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv3_jax.generation.drafters import Drafter
from dsv3_jax.generation.program import Program
from dsv3_jax.generation.programs import Programs
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.generation.state import DecodeState
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.layers.block import DecoderLayer
from dsv3_jax.layers.paged_cache import LayerCache
from dsv3_jax.layers.rope import rotation_at
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
        program: Program,
        state: DecodeState,
        *args: Any,
        static: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Compiled:
        """Compiles a program.

        Args:
          static: the program's static arguments, which come last.
          options: compiler options in addition to the program's own.
        """
        state_leaves, structure = jax.tree.flatten(state)
        return cls.of_leaves(
            program, state_leaves, structure, *args, static=static, options=options
        )

    @classmethod
    def of_leaves(
        cls,
        program: Program,
        state_leaves: list[Any],
        structure: Any,
        *args: Any,
        static: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Compiled:
        """Compiles a program for a flattened state: its arrays, or their shapes."""
        began = time.perf_counter()
        lowered = program.lower(state_leaves, structure, *args, static=static)
        executable = lowered.compile(program.options | (options or {}))
        elapsed = time.perf_counter() - began
        memory: Any = executable.memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        workspace = memory.temp_size_in_bytes + results
        arguments = memory.argument_size_in_bytes
        return cls(executable, program.leaves, structure, elapsed, arguments, workspace)

    def __call__(self, state: DecodeState, *args: Any) -> tuple[DecodeState, float]:
        """Runs the program. Returns the new state and the seconds that it took."""
        state_leaves, rest = jax.tree.leaves(state), jax.tree.leaves(args)
        began = time.perf_counter()
        results = jax.block_until_ready(self.executable(self.leaves, state_leaves, rest))
        elapsed = time.perf_counter() - began
        return jax.tree.unflatten(self.structure, results), elapsed


class Decode:
    """Greedy decoding of ``rows`` sequences with up to ``longest`` random cached tokens each."""

    def __init__(
        self,
        model: DeepSeekV3,
        rows: int,
        longest: int,
        drafter: Drafter | None = None,
        depth: int = 0,
        compiled: Compiled | None = None,
    ):
        """``compiled``: result of :meth:`planned` for the same arguments, to save a compilation."""
        self.longest, self._static = longest, (drafter, depth)
        programs = _programs(model, longest, depth)
        self._program = programs.decode
        state = _random_state(programs, rows, longest, depth, drafter is not None)
        self.state = self._program.shard(state)
        # Greedy. The seeds determine which synthetic drafts are accepted.
        self._sampling = Sampling.pack(seed=np.arange(rows))
        self.compiled = compiled or self.compile()

    @classmethod
    def planned(cls, model: DeepSeekV3, rows: int, longest: int) -> Compiled:
        """Compiles the program without allocating its state, so that autotuning has more memory."""
        programs = _programs(model, longest, 0)
        state_leaves, structure = programs.state_shapes(rows)
        arguments = structure, Sampling.pack(seed=np.arange(rows)), np.int32(1)
        return Compiled.of_leaves(programs.decode, state_leaves, *arguments, static=(None, 0))

    def compile(self, options: dict[str, Any] | None = None) -> Compiled:
        arguments = self.state, self._sampling, np.int32(1)
        return Compiled.of(self._program, *arguments, static=self._static, options=options)

    def dispatch(self, steps: int, cached: int, compiled: Compiled | None = None) -> float:
        """Runs ``steps`` steps after ``cached`` tokens per sequence. Returns the seconds."""
        state = self._program.shard(_before_first_step(self.state, cached))
        self.state, elapsed = (compiled or self.compiled)(state, self._sampling, np.int32(steps))
        assert int(self.state.steps) == steps, f"expected {steps} steps, got {self.state.steps}"
        self.tokens = int((np.asarray(self.state.lengths) - cached - 1).sum())
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


class Prefill:
    """Prefill of ``rows`` prompts of ``tokens`` random tokens each, in chunks of ``chunk``."""

    def __init__(self, model: DeepSeekV3, rows: int, tokens: int, chunk: int):
        self._rows, self._tokens = rows, tokens
        max_len = -(-(tokens + 1) // DEFAULT_PAGE_SIZE) * DEFAULT_PAGE_SIZE
        programs = Programs.of(
            model, max_len, prefill_chunk=chunk, vocab_size=model.config.vocab_size
        )
        self._program = programs.prefill
        self.state = self._with_empty_cache(_random_state(programs, rows, tokens, 0, False))
        self._chunks = np.int32(-(-tokens // chunk))
        self.compiled = Compiled.of(self._program, self.state, self._chunks, static=(None,))

    def measure(self) -> dict[str, float]:
        def run() -> float:
            state, elapsed = self.compiled(self.state, self._chunks)
            assert (np.asarray(state.cache.lengths) == self._tokens).all()
            self.state = self._with_empty_cache(state)
            return elapsed

        run()
        windows = [run() for _ in range(WINDOWS)]
        elapsed = statistics.median(windows)
        return {
            "ms": 1e3 * elapsed,
            "tokens_per_s": self._rows * self._tokens / elapsed,
            "spread": (max(windows) - min(windows)) / elapsed,
        }

    def _with_empty_cache(self, state: DecodeState) -> DecodeState:
        """Returns the state with an empty cache, as before a prefill."""
        cache = state.cache.with_lengths(jnp.zeros_like(state.cache.lengths))
        return self._program.shard(dataclasses.replace(state, cache=cache))


def _programs(model: DeepSeekV3, longest: int, depth: int) -> Programs:
    spare_tokens = LONG * (depth + 1)
    max_len = -(-(longest + 1 + spare_tokens) // DEFAULT_PAGE_SIZE) * DEFAULT_PAGE_SIZE
    return Programs.of(model, max_len, prefill_chunk=1, vocab_size=model.config.vocab_size)


def experts_visited(model: DeepSeekV3, state: DecodeState) -> list[int]:
    """Returns the number of distinct experts that each MoE layer uses in the next step."""
    starts = state.lengths - 1
    last = jnp.take_along_axis(state.tokens, starts[:, None], axis=1)
    rotation = rotation_at(model.config, starts[:, None])

    # One layer at a time, because layers of the same kind share a compiled program.
    @functools.partial(jax.jit, static_argnums=0)
    def run(graph: Any, weights: Any, x: jax.Array, pages: Any) -> tuple[jax.Array, Any]:
        layer: DecoderLayer = nnx.merge(graph, weights)
        cache = LayerCache(pages, state.cache.block_tables, starts, jnp.ones(last.shape, bool))
        x, _, stats = layer.extend(x, rotation, cache, "absorbed")
        return x, None if stats is None else jnp.sum(stats.counts > 0)

    x, visited = model.embed_tokens(last), []
    for layer, pages in zip(model.layers, state.cache.pool.layers, strict=True):
        x, count = run(*nnx.split(layer), x, pages)
        visited += [] if count is None else [int(count)]
    return visited


def _random_state(programs: Programs, rows: int, cached: int, depth: int, mtp: bool) -> DecodeState:
    config = programs.signature.config
    state = programs.empty_state(rows, depth=depth, mtp=mtp)

    pages, pool_structure = jax.tree.flatten(state.cache.pool)

    # In place and some pages at a time, because random bits take more memory than the values.
    @functools.partial(jax.jit, donate_argnums=0, out_shardings=pages[0].sharding)
    def fill(pages: jax.Array, seed: jax.Array) -> jax.Array:
        count = min(1024, len(pages))
        shape = (count, *pages.shape[1:])

        def fill_some(i: jax.Array, pages: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), i)
            numbers = jax.random.normal(key, shape, pages.dtype)
            # The last pages may overlap the previous ones.
            return jax.lax.dynamic_update_slice_in_dim(pages, numbers, i * count, axis=0)

        return jax.lax.fori_loop(0, -(-len(pages) // count), fill_some, pages)

    filled = [fill(each, jnp.int32(i)) for i, each in enumerate(pages)]
    cache = dataclasses.replace(state.cache, pool=jax.tree.unflatten(pool_structure, filled))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, state.tokens.shape, np.int32)
    mtp_inputs = jax.random.normal(
        jax.random.key(1), state.mtp_inputs.shape, state.mtp_inputs.dtype
    )
    state = dataclasses.replace(
        state,
        cache=cache,
        tokens=jnp.asarray(tokens),
        limits=jnp.full(rows, state.tokens.shape[1], jnp.int32),
        mtp_inputs=mtp_inputs,
    )
    return _before_first_step(state, cached)


def _before_first_step(state: DecodeState, cached: int) -> DecodeState:
    """Returns the state before the first step: ``cached`` tokens per sequence plus one uncached."""
    rows = len(state.lengths)
    state_leaves = jnp.full(rows, cached, jnp.int32)
    return dataclasses.replace(
        state,
        cache=state.cache.with_lengths(state_leaves),
        lengths=state_leaves + 1,
        finished=jnp.zeros(rows, jnp.int32),
        num_mtp_inputs=jnp.full(rows, min(1, state.mtp_inputs.shape[1]), jnp.int32),
        steps=jnp.int32(0),
    )
