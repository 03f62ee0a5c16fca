"""A batch of requests that runs through the compiled programs, and its results on the host."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv3_jax.generation.adjustments import Adjustments
from dsv3_jax.generation.completion import Completion, FinishReason, Speculation, TopLogprobs
from dsv3_jax.generation.depth import AUTO_STEPS, DepthChooser
from dsv3_jax.generation.plan import DraftPlan
from dsv3_jax.generation.programs import Programs
from dsv3_jax.generation.request import Request
from dsv3_jax.generation.results import FINISH_REASONS, Results
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.generation.settings import MAX_STOP_TOKENS, MAX_TOP_LOGPROBS
from dsv3_jax.generation.state import NON_FINITE, RUNNING, STOPPED, DecodeState
from dsv3_jax.generation.text import TextTracker
from dsv3_jax.tokenizer import Tokenizer
from sharding.distributed import host_values, max_over_processes

_WINDOW = 128  # positions of each sequence that are copied to the host at a time


class Batch:
    """Up to ``size`` requests, which are prefilled together and then decoded step by step.

    The batch is padded to ``size`` with sequences that are finished from the start. The device
    keeps the decoding state; the host keeps the results and copies new ones after each dispatch.

    Args:
      chooser: chooses the number of drafts of each dispatch, from the results of earlier ones.
      after_dispatch: called after each dispatch, when its results are on the host.
      is_warm_up: the requests are made up. Their drafts and expert choices are not counted.
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
        after_dispatch: Callable[[], None] = lambda: None,
        is_warm_up: bool = False,
    ):
        self._programs = programs
        self._plan = plan
        self._chooser = chooser
        self._after_dispatch = after_dispatch
        self._is_warm_up = is_warm_up
        self._requests = requests
        self.trackers = [TextTracker(tokenizer, r.stop, r.min_tokens) for r in requests]
        """Tokens and text of each request."""
        self.has_stop_strings = any(request.stop for request in requests)
        self.steps = 0
        """Number of decode steps so far."""
        self._results = [Results() for _ in requests]
        # Host copies of the state's fields, as of the last dispatch.
        num_padding = size - len(requests)
        sequences = [*requests, *[Request(prompt=(0,))] * num_padding]
        finished = [RUNNING] * len(requests) + [STOPPED] * num_padding
        self._finished = np.array(finished, np.int32)
        self._lengths = np.array([len(request.prompt) for request in sequences], np.int32)
        self._drafted = self._accepted = np.zeros((size, plan.max_depth), np.int32)
        self._sequence_steps = np.zeros(size, np.int32)
        self._routing_counts: np.ndarray | int = 0
        self._sampling = _sampling(sequences)
        self._adjustments = Adjustments.of(sequences, programs.signature.config.vocab_size)
        self._state: DecodeState | None = self._initial_state(sequences)

    def free(self) -> None:
        """Frees the state on the device. Results on the host stay."""
        self._state = None

    def _initial_state(self, sequences: Sequence[Request]) -> DecodeState:
        S, drafter = self._programs.max_len, self._plan.drafter
        tokens = np.zeros((len(sequences), S), np.int32)
        for b, request in enumerate(sequences):
            tokens[b, : len(request.prompt)] = request.prompt
        limits = [min(len(r.prompt) + r.max_new_tokens, S) for r in sequences]
        state = self._programs.empty_state(
            len(sequences),
            depth=self._plan.max_depth,
            mtp=drafter is not None and drafter.mtp_hidden is not None,
            # Either none or the maximum, so that two programs serve all requests.
            num_top_logprobs=MAX_TOP_LOGPROBS if any(r.logprobs for r in sequences) else 0,
        )
        return dataclasses.replace(
            state,
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray(self._lengths),
            limits=jnp.asarray(np.array(limits, np.int32)),
            finished=jnp.asarray(self._finished),
        )

    @property
    def is_running(self) -> bool:
        """Whether any request is unfinished."""
        return bool(np.any(self._finished == RUNNING))

    @property
    def non_finite(self) -> list[int]:
        """Indices of the requests that ended because their logits were not finite."""
        return np.flatnonzero(self._finished == NON_FINITE).tolist()

    def prefill(self) -> None:
        """Caches the prompts, in dispatches of about DISPATCH_SECONDS."""
        programs, drafter, state = self._programs, self._plan.drafter, self._live_state
        longest = max(len(request.prompt) - 1 for request in self._requests)
        chunks = -(-longest // programs.prefill_chunk)
        program = ("prefill", *_shape(state), drafter)
        while True:
            count = min(chunks, programs.step_times.steps_per_dispatch(program))
            began = time.perf_counter()
            # Assigned at once: an interrupt may come at any time, and the old state is donated.
            self._state = state = programs.prefill(state, np.int32(count), drafter)
            jax.block_until_ready(state.lengths)
            seconds = self._max_over_processes(time.perf_counter() - began)
            programs.step_times.record(program, count, seconds)
            chunks -= count
            self._after_dispatch()
            if not chunks:
                return

    def advance(self, tokens: int | None = None, *, depth: int | None = None) -> None:
        """Decodes in one dispatch and copies the results to the host.

        Args:
          tokens: approximate number of tokens per sequence. None lets the dispatch take about
            DISPATCH_SECONDS, or fewer steps if the depth is chosen anew for each dispatch.
          depth: number of drafts per step. None leaves it to the chooser. The chooser observes the
            dispatch in both cases.
        """
        depth = self._chooser.choose() if depth is None else depth
        parts = jax.tree.structure(self._adjustments)
        program = ("decode", *_shape(self._live_state), self._plan.drafter, depth, parts)
        times = self._programs.step_times
        if tokens is not None:
            steps = max(1, tokens // (depth + 1))
        elif self._chooser.is_fixed:
            steps = times.steps_per_dispatch(program)
        else:
            steps = min(times.steps_per_dispatch(program, default=AUTO_STEPS), AUTO_STEPS)
        self._dispatch(program, depth, steps)
        self._copy_new_tokens()
        self._after_dispatch()

    @property
    def _live_state(self) -> DecodeState:
        if self._state is None:
            raise RuntimeError("this batch was freed")
        return self._state

    def _dispatch(self, program: Hashable, depth: int, max_steps: int) -> None:
        """Runs the decode program, and copies its counters to the host."""
        times = self._programs.step_times
        is_compiled = times.has_run(program)
        steps_before, began = self.steps, time.perf_counter()
        # Assigned at once: an interrupt may come at any time, and the old state is donated.
        self._state = state = self._programs.decode(
            self._live_state,
            self._sampling,
            np.int32(max_steps),
            self._plan.drafter,
            depth,
            self._adjustments,
        )
        finished, drafted, accepted, self._sequence_steps, total_steps = host_values(
            (state.finished, state.drafted, state.accepted, state.sequence_steps, state.steps)
        )
        seconds = self._max_over_processes(time.perf_counter() - began)
        self._count_routing(state)
        self._finished, self.steps = finished.copy(), int(total_steps)
        steps = self.steps - steps_before
        times.record(program, steps, seconds)
        # Made-up prompts show the cost of drafts, but not how often drafts are accepted.
        weight = 0 if self._is_warm_up else 1
        self._chooser.observe(
            depth,
            (weight * (drafted - self._drafted)).sum(axis=0).tolist(),
            (weight * (accepted - self._accepted)).sum(axis=0).tolist(),
            steps,
            seconds if is_compiled else None,
        )
        self._drafted, self._accepted = drafted, accepted

    def _max_over_processes(self, seconds: float) -> float:
        """Returns the maximum over all processes, so that they choose the same steps and depths."""
        return (
            seconds if self._live_state.steps.is_fully_addressable else max_over_processes(seconds)
        )

    def _copy_new_tokens(self) -> None:
        """Copies new tokens and log-probabilities to the host, and looks for stop strings."""
        state, begin = self._live_state, self._lengths
        lengths = host_values(state.lengths)
        new_tokens: list[list[int]] = [[] for _ in self._requests]
        while (begin < lengths).any():
            arrays = (state.tokens, state.logprobs, state.top_tokens, state.top_logprobs)
            window = host_values(_window(arrays, begin))
            end = np.minimum(begin + window[0].shape[1], lengths)
            for b, results in enumerate(self._results):
                tokens, logprobs, *top = (array[b, : end[b] - begin[b]] for array in window)
                new_tokens[b] += tokens.tolist()
                results.add(logprobs.tolist())
                if self._requests[b].logprobs:
                    results.add_top(self._requests[b].logprobs, *top)
            begin = end
        for b, tracker in enumerate(self.trackers):
            if not tracker.stopped:
                tracker.extend(new_tokens[b])
                if tracker.stopped:
                    self._finished[b] = STOPPED
        self._lengths = lengths
        if self.has_stop_strings:
            self._state = dataclasses.replace(state, finished=jnp.asarray(self._finished))

    def _count_routing(self, state: DecodeState) -> None:
        total, counts = self._programs.routing_counts, state.cache.routing_counts
        if total is not None and counts is not None and not self._is_warm_up:
            counts = host_values(counts)
            total += counts - self._routing_counts
            self._routing_counts = counts

    def finish_reason(self, b: int) -> FinishReason:
        """Returns the finish reason of request ``b``; ``"interrupted"`` while it is running."""
        return FINISH_REASONS[int(self._finished[b])]

    def logprobs(
        self, b: int, begin: int, end: int
    ) -> tuple[list[float], list[TopLogprobs] | None]:
        """Returns the values of request ``b`` as :meth:`Results.between` does."""
        return self._results[b].between(begin, end, self._requests[b])

    def completions(self) -> list[Completion]:
        """Returns the completion of each request, as far as it has been generated."""
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
            steps=int(self._sequence_steps[b]),
            tokens=int(self._sequence_steps[b] + self._accepted[b].sum()),
            drafted=tuple(self._drafted[b].tolist()),
            accepted=tuple(self._accepted[b].tolist()),
        )


def _shape(state: DecodeState) -> tuple[int, ...]:
    """Returns the sizes of a state that identify its compiled program."""
    return (*state.tokens.shape, state.top_tokens.shape[-1], state.drafted.shape[-1])


@jax.jit
def _window(arrays: tuple[jax.Array, ...], begin: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the positions from ``begin`` on of each sequence: [B, _WINDOW, ...] of arrays
    [B, S, ...]. The host would otherwise copy all S positions after each dispatch."""

    def window(array: jax.Array) -> jax.Array:
        count = min(_WINDOW, array.shape[1])
        positions = begin[:, None] + jnp.arange(count)
        positions = positions.reshape(*positions.shape, *[1] * (array.ndim - 2))
        return jnp.take_along_axis(array, positions, axis=1, mode="clip")

    return jax.tree.map(window, arrays)


def _sampling(requests: Sequence[Request]) -> Sampling:
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    stop_tokens = np.full((len(requests), MAX_STOP_TOKENS), -1)
    for b, request in enumerate(requests):
        stop_tokens[b, : len(request.stop_tokens)] = request.stop_tokens
    columns = {name: np.array([getattr(r, name) for r in requests]) for name in names}
    return Sampling.pack(stop_tokens=stop_tokens, **columns)
