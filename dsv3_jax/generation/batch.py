"""A batch of requests on its way through the compiled programs, and its text on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dsv3_jax.generation.completion import Completion, FinishReason
from dsv3_jax.generation.request import MAX_STOP_TOKENS, MAX_TOP_LOGPROBS, Request
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.generation.state import RUNNING, STOPPED, DecodeState
from dsv3_jax.generation.text import TextTracker
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Programs:
    """The two compiled programs, which donate the state they are given, and an empty cache."""

    prefill: Callable[[DecodeState], DecodeState]
    decode: Callable[[DecodeState, Sampling, np.int32], DecodeState]
    empty_cache: Callable[[int], LatentKVCache]
    """Of that many rows, ``max_len`` tokens each."""
    max_len: int


class Batch:
    """Up to ``size`` requests, prefilled, then decoded step by step.

    Rows that only pad the batch are finished from the start.
    """

    def __init__(
        self,
        programs: Programs,
        tokenizer: Tokenizer | None,
        requests: Sequence[Request],
        size: int,
    ):
        self._programs = programs
        self._requests = requests
        self.trackers = [TextTracker(tokenizer, request.stop) for request in requests]
        self.watches_text = any(request.stop for request in requests)
        padding = size - len(requests)
        rows = [*requests, *[Request(prompt=(0,))] * padding]
        self._finished = np.array([RUNNING] * len(requests) + [STOPPED] * padding, np.int32)
        self._sampling = _sampling(rows)
        self._state = programs.prefill(self._initial_state(rows))

    def _initial_state(self, rows: Sequence[Request]) -> DecodeState:
        B, S = len(rows), self._programs.max_len
        tokens = np.zeros((B, S), np.int32)
        for b, row in enumerate(rows):
            tokens[b, : len(row.prompt)] = row.prompt
        lengths = np.array([len(row.prompt) for row in rows], np.int32)
        limits = np.array([min(len(row.prompt) + row.max_new_tokens, S) for row in rows], np.int32)
        # Either none or the most that can be asked for, so that two programs serve all requests.
        top = MAX_TOP_LOGPROBS if any(row.logprobs for row in rows) else 0
        return DecodeState(
            cache=self._programs.empty_cache(B),
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray(lengths),
            limits=jnp.asarray(limits),
            finished=jnp.asarray(self._finished),
            logprobs=jnp.zeros((B, S), jnp.float32),
            top_tokens=jnp.zeros((B, S, top), jnp.int32),
            top_logprobs=jnp.zeros((B, S, top), jnp.float32),
            steps=jnp.int32(0),
        )

    @property
    def running(self) -> bool:
        return bool(np.any(self._finished == RUNNING))

    @property
    def steps(self) -> int:
        """Decode steps so far."""
        return int(self._state.steps)

    def advance(self, steps: int) -> None:
        """Decodes up to that many tokens a row, and brings the text up to date."""
        state = self._programs.decode(self._state, self._sampling, np.int32(steps))
        tokens, lengths, finished = jax.device_get((state.tokens, state.lengths, state.finished))
        self._finished = finished.copy()
        for b, (request, tracker) in enumerate(zip(self._requests, self.trackers, strict=True)):
            if tracker.stopped:
                continue
            held = len(request.prompt) + len(tracker.tokens)
            tracker.extend(tokens[b, held : lengths[b]].tolist())
            if tracker.stopped:
                self._finished[b] = STOPPED
        if self.watches_text:
            state = dataclasses.replace(state, finished=jnp.asarray(self._finished))
        self._state = state

    def finish_reason(self, b: int) -> FinishReason:
        """Of a row that no longer runs."""
        return "stop" if self._finished[b] == STOPPED else "length"

    def completions(self) -> list[Completion]:
        """What each request came to."""
        state = self._state
        arrays = jax.device_get((state.logprobs, state.top_tokens, state.top_logprobs))
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
        )


def _sampling(rows: Sequence[Request]) -> Sampling:
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    stops = np.full((len(rows), MAX_STOP_TOKENS), -1)
    for b, row in enumerate(rows):
        stops[b, : len(row.stop_tokens)] = row.stop_tokens
    columns = {name: np.array([getattr(row, name) for row in rows]) for name in names}
    return Sampling.pack(stop_tokens=stops, **columns)
