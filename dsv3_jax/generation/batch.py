"""A batch of requests on its way through the compiled programs, and its text on the host."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from dsv3_jax.generation.completion import Completion, FinishReason, Speculation
from dsv3_jax.generation.depth import AUTO_STEPS, DepthChooser
from dsv3_jax.generation.plan import DraftPlan
from dsv3_jax.generation.programs import Programs
from dsv3_jax.generation.request import MAX_STOP_TOKENS, MAX_TOP_LOGPROBS, Request
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.generation.state import RUNNING, STOPPED, DecodeState
from dsv3_jax.generation.text import TextTracker
from dsv3_jax.tokenizer import Tokenizer
from sharding.distributed import host_values, slowest


class Batch:
    """Up to ``size`` requests, prefilled, then decoded step by step.

    Rows that only pad the batch are finished from the start. ``chooser`` says how deep to draft,
    and hears what came of it.
    """

    def __init__(
        self,
        programs: Programs,
        tokenizer: Tokenizer | None,
        requests: Sequence[Request],
        size: int,
        plan: DraftPlan,
        chooser: DepthChooser,
    ):
        self._programs = programs
        self._plan = plan
        self._chooser = chooser
        self._requests = requests
        self.trackers = [TextTracker(tokenizer, request.stop) for request in requests]
        self.watches_text = any(request.stop for request in requests)
        padding = size - len(requests)
        rows = [*requests, *[Request(prompt=(0,))] * padding]
        self._finished = np.array([RUNNING] * len(requests) + [STOPPED] * padding, np.int32)
        self._sampling = _sampling(rows)
        self._state = programs.prefill(self._initial_state(rows), plan.drafter)
        self._drafted = self._accepted = np.zeros((size, plan.most), np.int32)
        self._row_steps = np.zeros(size, np.int32)
        self._routing_counts: np.ndarray | int = 0
        self.steps = 0  # decode steps so far

    def _initial_state(self, rows: Sequence[Request]) -> DecodeState:
        S, drafter = self._programs.max_len, self._plan.drafter
        tokens = np.zeros((len(rows), S), np.int32)
        for b, row in enumerate(rows):
            tokens[b, : len(row.prompt)] = row.prompt
        lengths = np.array([len(row.prompt) for row in rows], np.int32)
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
            lengths=jnp.asarray(lengths),
            limits=jnp.asarray(limits),
            finished=jnp.asarray(self._finished),
        )

    @property
    def running(self) -> bool:
        return bool(np.any(self._finished == RUNNING))

    def advance(self, tokens: int | None = None, *, depth: int | None = None) -> None:
        """Decodes about that many tokens a row, or as far as one dispatch goes, and brings the text
        up to date.

        That is to the end, unless the depth is chosen anew for every dispatch. A ``depth`` given
        is not left to the chooser, which hears of it all the same.
        """
        depth = self._chooser.choose() if depth is None else depth
        if tokens is None:
            steps = self._programs.max_len if self._chooser.is_fixed else AUTO_STEPS
        else:
            steps = max(1, tokens // (depth + 1))
        self._dispatch(depth, steps)
        state = self._state
        tokens_held, lengths = host_values((state.tokens, state.lengths))
        for b, (request, tracker) in enumerate(zip(self._requests, self.trackers, strict=True)):
            if tracker.stopped:
                continue
            held = len(request.prompt) + len(tracker.tokens)
            tracker.extend(tokens_held[b, held : lengths[b]].tolist())
            if tracker.stopped:
                self._finished[b] = STOPPED
        if self.watches_text:
            self._state = dataclasses.replace(state, finished=jnp.asarray(self._finished))

    def _dispatch(self, depth: int, steps: int) -> None:
        state, drafter = self._state, self._plan.drafter
        shape = (*state.tokens.shape, state.top_tokens.shape[-1], self._plan.most)
        program = (*shape, drafter, depth)
        compiled = program in self._programs.ran
        steps_before, began = self.steps, time.perf_counter()
        state = self._programs.decode(state, self._sampling, np.int32(steps), drafter, depth)
        counters = (state.finished, state.drafted, state.accepted, state.row_steps, state.steps)
        finished, drafted, accepted, self._row_steps, steps_done = host_values(counters)
        seconds = time.perf_counter() - began
        self._count_routing(state)
        if not (self._chooser.is_fixed or state.steps.is_fully_addressable):
            seconds = slowest(seconds)  # or else processes would choose each for itself
        self._finished, self.steps = finished.copy(), int(steps_done)
        self._programs.ran.add(program)
        self._chooser.observe(
            depth,
            (drafted - self._drafted).sum(axis=0).tolist(),
            (accepted - self._accepted).sum(axis=0).tolist(),
            self.steps - steps_before,
            seconds if compiled else None,
        )
        self._state, self._drafted, self._accepted = state, drafted, accepted

    def _count_routing(self, state: DecodeState) -> None:
        total, counts = self._programs.routing_counts, state.cache.routing_counts
        if total is not None and counts is not None:
            counts = host_values(counts)
            total += counts - self._routing_counts
            self._routing_counts = counts

    def finish_reason(self, b: int) -> FinishReason:
        """Of a row that no longer runs."""
        return "stop" if self._finished[b] == STOPPED else "length"

    def completions(self) -> list[Completion]:
        """What each request came to."""
        state = self._state
        arrays = host_values((state.logprobs, state.top_tokens, state.top_logprobs))
        return [
            self._completion(b, request, *(array[b] for array in arrays))
            for b, request in enumerate(self._requests)
        ]

    def _completion(
        self,
        b: int,
        request: Request,
        logprobs: np.ndarray,
        top_tokens: np.ndarray,
        top_logprobs: np.ndarray,
    ) -> Completion:
        tokens, begin, n = self.trackers[b].tokens, len(request.prompt), request.logprobs
        places = range(begin, begin + len(tokens))
        tops = [
            list(zip(top_tokens[p, :n].tolist(), top_logprobs[p, :n].tolist(), strict=True))
            for p in places
        ]
        return Completion(
            text=self.trackers[b].text,
            tokens=list(tokens),
            logprobs=logprobs[begin : begin + len(tokens)].tolist(),
            finish_reason=self.finish_reason(b),
            prompt_tokens=begin,
            top_logprobs=tops if n else None,
            speculation=self._speculation(b),
        )

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


def _sampling(rows: Sequence[Request]) -> Sampling:
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    stops = np.full((len(rows), MAX_STOP_TOKENS), -1)
    for b, row in enumerate(rows):
        stops[b, : len(row.stop_tokens)] = row.stop_tokens
    columns = {name: np.array([getattr(row, name) for row in rows]) for name in names}
    return Sampling.pack(stop_tokens=stops, **columns)
