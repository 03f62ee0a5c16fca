"""Completions and statistics of one call of the Generator, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dsv3_jax.generation.batch import Batch
from dsv3_jax.generation.completion import Completion, Generation, Speculation, Stats
from dsv3_jax.generation.errors import NonFiniteLogitsError
from dsv3_jax.generation.request import Request
from dsv3_jax.generation.results import not_begun
from dsv3_jax.words import counted


class Tally:
    """Completions and statistics of a call, as far as it has come."""

    def __init__(self, requests: Sequence[Request], began: float, n: int = 1):
        self._requests = requests
        self.n = n  # requests a prompt
        self._began = began
        self._batch: Batch | None = None
        self._completions: list[Completion] = []
        self._first: float | None = None  # when the first batch had its first tokens
        self._first_done = 0.0
        self._first_tokens = self._steps = self._later_tokens = 0
        self._later_seconds = 0.0

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._first_done, self._first_tokens = 0.0, 0

    def has_first_tokens(self) -> None:
        self._first_done, self._first_tokens = time.perf_counter(), self._new_tokens()
        self._first = self._first or self._first_done

    def end(self) -> None:
        """Takes over what the batch came to."""
        if self._batch is None:
            return
        if self._first_done:
            self._later_seconds += time.perf_counter() - self._first_done
            self._later_tokens += self._new_tokens() - self._first_tokens
        self._steps += self._batch.steps
        self._completions += self._batch.completions()
        self._batch = None

    @property
    def new_tokens(self) -> int:
        """Of all prompts so far."""
        return sum(len(c.tokens) for c in self._completions) + self._new_tokens()

    def _new_tokens(self) -> int:
        return 0 if self._batch is None else sum(len(t.tokens) for t in self._batch.trackers)

    def generation(self) -> Generation:
        """With a completion for every request; those that were not begun have no tokens."""
        rest = map(not_begun, self._requests[len(self._completions) :])
        completions = [*self._completions, *rest]
        rate = self._later_tokens / self._later_seconds if self._later_tokens > 0 else 0.0
        return Generation(
            completions,
            Stats(
                steps=self._steps,
                new_tokens=sum(len(c.tokens) for c in completions),
                time_to_first_token=(self._first or self._began) - self._began,
                seconds=time.perf_counter() - self._began,
                tokens_per_second=rate,
                speculation=Speculation.total([c.speculation for c in completions]),
            ),
        )


def non_finite(batch: Batch, tally: Tally, first: int) -> NonFiniteLogitsError:
    """The error of a batch whose first request is that of number ``first``."""
    generation, numbers = tally.generation(), [first + b for b in batch.broken]
    completion = generation[numbers[0]]
    others = f" (and {counted(len(numbers) - 1, 'other sequence')})" if len(numbers) > 1 else ""
    return NonFiniteLogitsError(
        f"prompt {numbers[0] // tally.n}{others}: expected finite logits for position "
        f"{completion.prompt_tokens + len(completion.tokens)} ({completion.prompt_tokens} prompt "
        f"and {len(completion.tokens)} generated tokens before it), got NaN or an infinity; a "
        "weight is not finite, or activations overflow",
        generation,
    )
