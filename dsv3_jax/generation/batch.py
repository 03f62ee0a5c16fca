"""A batch of requests on its way through the compiled programs, and its text on the host."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv3_jax.generation.completion import Completion, FinishReason, Speculation
from dsv3_jax.generation.depth import AUTO_STEPS, DepthChooser
from dsv3_jax.generation.plan import DraftPlan
from dsv3_jax.generation.programs import Programs
from dsv3_jax.generation.request import Request
from dsv3_jax.generation.results import FINISH_REASONS, Results
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.generation.settings import MAX_STOP_TOKENS, MAX_TOP_LOGPROBS
from dsv3_jax.generation.state import NOT_FINITE, RUNNING, STOPPED, DecodeState
from dsv3_jax.generation.text import TextTracker
from dsv3_jax.tokenizer import Tokenizer
from sharding.distributed import host_values, max_over_processes

_WINDOW = 128  # tokens of each sequence that are copied to the host at a time

DISPATCH_SECONDS = 0.5
"""Aim for the length of a dispatch: nothing can interrupt one, and a stop string ends a sequence
behind it. The host takes about a millisecond between two."""


class Batch:
    """Up to ``size`` requests, prefilled, then decoded step by step.

    Rows that only pad the batch are finished from the start. ``chooser`` says how deep to draft,
    and hears what came of it. The host keeps all results, and copies of the device what is new.

    Args:
      between: called after each dispatch, when the host has all that came of it.
      warms_up: the requests are made up: nothing is learnt of their drafts, nothing counted.
    """

    def __init__(
        self,
        programs: Programs,
        tokenizer: Tokenizer | None,
        requests: Sequence[Request],
        size: int,
        plan: DraftPlan,
        chooser: DepthChooser,
        *,
        between: Callable[[], None] = lambda: None,
        warms_up: bool = False,
    ):
        self._programs = programs
        self._plan = plan
        self._chooser = chooser
        self._between = between
        self._warms_up = warms_up
        self._requests = requests
        self.trackers = [TextTracker(tokenizer, request.stop) for request in requests]
        self.watches_text = any(request.stop for request in requests)
        self._results = [Results() for _ in requests]
        padding = size - len(requests)
        rows = [*requests, *[Request(prompt=(0,))] * padding]
        self._finished = np.array([RUNNING] * len(requests) + [STOPPED] * padding, np.int32)
        self._lengths = np.array([len(row.prompt) for row in rows], np.int32)
        self._drafted = self._accepted = np.zeros((size, plan.most), np.int32)
        self._row_steps = np.zeros(size, np.int32)
        self._routing_counts: np.ndarray | int = 0
        self.steps = 0  # decode steps so far
        self._sampling = _sampling(rows)
        self._state: DecodeState | None = self._initial_state(rows)

    def free(self) -> None:
        """Frees the state on the device. What came of the requests stays."""
        self._state = None

    def _initial_state(self, rows: Sequence[Request]) -> DecodeState:
        S, drafter = self._programs.max_len, self._plan.drafter
        tokens = np.zeros((len(rows), S), np.int32)
        for b, row in enumerate(rows):
            tokens[b, : len(row.prompt)] = row.prompt
        limits = np.array([min(len(row.prompt) + row.max_new_tokens, S) for row in rows], np.int32)
        state = self._programs.empty_state(
            len(rows),
            depth=self._plan.most,
            mtp=drafter is not None and drafter.mtp_hidden is not None,
            # Either none or the most that can be asked for, so that two programs serve all.
            top=MAX_TOP_LOGPROBS if any(row.logprobs for row in rows) else 0,
        )
        return dataclasses.replace(
            state,
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray(self._lengths),
            limits=jnp.asarray(limits),
            finished=jnp.asarray(self._finished),
        )

    @property
    def running(self) -> bool:
        return bool(np.any(self._finished == RUNNING))

    @property
    def broken(self) -> list[int]:
        """Rows whose logits were not finite, behind their last token."""
        return np.flatnonzero(self._finished == NOT_FINITE).tolist()

    def prefill(self) -> None:
        """Caches the prompts."""
        programs, drafter, state = self._programs, self._plan.drafter, self._live
        longest = max(len(request.prompt) - 1 for request in self._requests)
        chunks = -(-longest // programs.prefill_chunk)
        program = ("prefill", *_shape(state), drafter)
        while True:
            compiled = program in programs.seconds
            count = min(chunks, _fitting(programs.seconds.get(program)))
            began = time.perf_counter()
            # At once: an interrupt may come anywhere, and the state before is donated.
            self._state = state = programs.prefill(state, np.int32(count), drafter)
            jax.block_until_ready(state.lengths)
            seconds = self._agreed(time.perf_counter() - began)
            if count or not compiled:
                programs.seconds[program] = seconds / max(count, 1) if compiled else None
            chunks -= count
            self._between()
            if not chunks:
                return

    def advance(self, tokens: int | None = None, *, depth: int | None = None) -> None:
        """Decodes about that many tokens a row, or as far as one dispatch goes, and brings the text
        up to date.

        A dispatch takes about DISPATCH_SECONDS, but for the steps that ``tokens`` needs; fewer
        where the depth is chosen anew for each. A ``depth`` given is not left to the chooser, which
        hears of it all the same.
        """
        depth = self._chooser.choose() if depth is None else depth
        program = ("decode", *_shape(self._live), self._plan.drafter, depth)
        if tokens is None:
            seconds = self._programs.seconds.get(program)
            if self._chooser.is_fixed:
                steps = _fitting(seconds)
            else:
                steps = AUTO_STEPS if seconds is None else min(_fitting(seconds), AUTO_STEPS)
        else:
            steps = max(1, tokens // (depth + 1))
        self._dispatch(program, depth, steps)
        self._read_new_tokens()
        self._between()

    @property
    def _live(self) -> DecodeState:
        if self._state is None:
            raise RuntimeError("this batch was freed")
        return self._state

    def _dispatch(self, program: tuple[object, ...], depth: int, steps: int) -> None:
        programs = self._programs
        compiled = program in programs.seconds
        steps_before, began = self.steps, time.perf_counter()
        # At once: an interrupt may come anywhere, and the state before is donated.
        self._state = state = programs.decode(
            self._live, self._sampling, np.int32(steps), self._plan.drafter, depth
        )
        counters = (state.finished, state.drafted, state.accepted, state.row_steps, state.steps)
        finished, drafted, accepted, self._row_steps, steps_done = host_values(counters)
        seconds = self._agreed(time.perf_counter() - began)
        self._count_routing(state)
        self._finished, self.steps = finished.copy(), int(steps_done)
        done = self.steps - steps_before
        if done or not compiled:
            programs.seconds[program] = seconds / max(done, 1) if compiled else None
        # What is drafted for a made-up prompt says nothing of others; what it costs, does.
        learnt = 0 if self._warms_up else 1
        self._chooser.observe(
            depth,
            (learnt * (drafted - self._drafted)).sum(axis=0).tolist(),
            (learnt * (accepted - self._accepted)).sum(axis=0).tolist(),
            done,
            seconds if compiled else None,
        )
        self._drafted, self._accepted = drafted, accepted

    def _agreed(self, seconds: float) -> float:
        """The same on all processes: each would choose steps and depths for itself otherwise."""
        return seconds if self._live.steps.is_fully_addressable else max_over_processes(seconds)

    def _read_new_tokens(self) -> None:
        """Copies what is new of tokens, log-probabilities and text to the host."""
        state, begin = self._live, self._lengths
        lengths = host_values(state.lengths)
        fresh: list[list[int]] = [[] for _ in self._requests]
        while (begin < lengths).any():
            arrays = (state.tokens, state.logprobs, state.top_tokens, state.top_logprobs)
            window = host_values(_window(arrays, begin))
            end = np.minimum(begin + window[0].shape[1], lengths)
            for b, results in enumerate(self._results):
                tokens, *others = (array[b, : end[b] - begin[b]] for array in window)
                fresh[b] += tokens.tolist()
                results.add(self._requests[b].logprobs, *others)
            begin = end
        for b, tracker in enumerate(self.trackers):
            if not tracker.stopped:
                tracker.extend(fresh[b])
                if tracker.stopped:
                    self._finished[b] = STOPPED
        self._lengths = lengths
        if self.watches_text:
            self._state = dataclasses.replace(state, finished=jnp.asarray(self._finished))

    def _count_routing(self, state: DecodeState) -> None:
        total, counts = self._programs.routing_counts, state.cache.routing_counts
        if total is not None and counts is not None and not self._warms_up:
            counts = host_values(counts)
            total += counts - self._routing_counts
            self._routing_counts = counts

    def finish_reason(self, b: int) -> FinishReason:
        """Of a row; ``interrupted`` where it still runs."""
        return FINISH_REASONS[int(self._finished[b])]

    def completions(self) -> list[Completion]:
        """What each request came to, or has come to so far."""
        return [
            self._results[b].completion(
                request, self.trackers[b], self.finish_reason(b), self._speculation(b)
            )
            for b, request in enumerate(self._requests)
        ]

    def _speculation(self, b: int) -> Speculation | None:
        if self._plan.drafter is None:
            return None
        return Speculation(
            draft=self._plan.drafter.name,
            steps=int(self._row_steps[b]),
            tokens=int(self._row_steps[b] + self._accepted[b].sum()),
            drafted=tuple(self._drafted[b].tolist()),
            accepted=tuple(self._accepted[b].tolist()),
        )


def _shape(state: DecodeState) -> tuple[int, ...]:
    """Whatever of a state's shapes programs are compiled for."""
    return (*state.tokens.shape, state.top_tokens.shape[-1], state.drafted.shape[-1])


def _fitting(seconds: float | None) -> int:
    """How many runs of so many seconds fit into a dispatch: few, where that is not known."""
    if seconds is None:
        return 1
    return int(min(max(DISPATCH_SECONDS / max(seconds, 1e-9), 1), 2**30))


@jax.jit
def _window(arrays: tuple[jax.Array, ...], begin: jax.Array) -> tuple[jax.Array, ...]:
    """Of arrays [B, S, ...], the next positions of each row: [B, _WINDOW, ...]."""

    def window(array: jax.Array) -> jax.Array:
        count = min(_WINDOW, array.shape[1])
        positions = begin[:, None] + jnp.arange(count)
        positions = positions.reshape(*positions.shape, *[1] * (array.ndim - 2))
        return jnp.take_along_axis(array, positions, axis=1, mode="clip")

    return jax.tree.map(window, arrays)


def _sampling(rows: Sequence[Request]) -> Sampling:
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    stops = np.full((len(rows), MAX_STOP_TOKENS), -1)
    for b, row in enumerate(rows):
        stops[b, : len(row.stop_tokens)] = row.stop_tokens
    columns = {name: np.array([getattr(row, name) for row in rows]) for name in names}
    return Sampling.pack(stop_tokens=stops, **columns)
