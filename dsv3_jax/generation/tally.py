"""Completions and statistics of one call of the Generator, collected batch by batch."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dsv3_jax.generation.batch import Batch
from dsv3_jax.generation.completion import Completion, Generation, Speculation, Stats
from dsv3_jax.generation.errors import NonFiniteLogitsError
from dsv3_jax.generation.request import Request
from dsv3_jax.generation.results import not_started
from dsv3_jax.words import counted


class Tally:
    """Completions and statistics of a call so far.

    Args:
      began: ``time.perf_counter()`` at the start of the call.
      n: number of requests per prompt.
    """

    def __init__(self, requests: Sequence[Request], began: float, n: int = 1):
        self._requests = requests
        self.n = n
        self._began = began
        self._completions: list[Completion] = []  # of all batches but the current one
        self._steps = 0  # the same
        self._first_token_at: float | None = None  # in the first batch
        # Tokens after each batch's first step, and the time that they took.
        self._later_tokens = 0
        self._later_seconds = 0.0
        # The current batch, and the time and number of tokens after its first step.
        self._batch: Batch | None = None
        self._first_step_at: float | None = None
        self._first_tokens = 0

    def begin(self, batch: Batch) -> None:
        """Makes ``batch`` the current one."""
        self._batch = batch
        self._first_step_at, self._first_tokens = None, 0

    def record_first_tokens(self) -> None:
        """Records that the current batch has finished its first step."""
        self._first_step_at, self._first_tokens = time.perf_counter(), self._batch_tokens()
        self._first_token_at = self._first_token_at or self._first_step_at

    def end(self) -> None:
        """Adds the results of the current batch."""
        if self._batch is None:
            return
        if self._first_step_at is not None:
            self._later_seconds += time.perf_counter() - self._first_step_at
            self._later_tokens += self._batch_tokens() - self._first_tokens
        self._steps += self._batch.steps
        self._completions += self._batch.completions()
        self._batch = None

    @property
    def new_tokens(self) -> int:
        """Number of tokens generated so far, for all prompts together."""
        return sum(len(c.tokens) for c in self._completions) + self._batch_tokens()

    def _batch_tokens(self) -> int:
        return 0 if self._batch is None else sum(len(t.tokens) for t in self._batch.trackers)

    def generation(self) -> Generation:
        """Returns a completion for every request. Requests that have not started have no tokens."""
        rest = map(not_started, self._requests[len(self._completions) :])
        completions = [*self._completions, *rest]
        rate = self._later_tokens / self._later_seconds if self._later_tokens > 0 else 0.0
        return Generation(
            completions,
            Stats(
                steps=self._steps,
                new_tokens=sum(len(c.tokens) for c in completions),
                time_to_first_token=(self._first_token_at or self._began) - self._began,
                seconds=time.perf_counter() - self._began,
                tokens_per_second=rate,
                speculation=Speculation.total([c.speculation for c in completions]),
            ),
        )


def non_finite_error(batch: Batch, tally: Tally, first: int) -> NonFiniteLogitsError:
    """Returns the error for the first request of ``batch`` whose logits are not finite.

    Args:
      first: index in the call of the batch's first request.
    """
    generation, indices = tally.generation(), [first + b for b in batch.non_finite]
    completion = generation[indices[0]]
    others = f" (and {counted(len(indices) - 1, 'other sequence')})" if len(indices) > 1 else ""
    return NonFiniteLogitsError(
        f"prompt {indices[0] // tally.n}{others}: expected finite logits for position "
        f"{completion.prompt_tokens + len(completion.tokens)} ({completion.prompt_tokens} prompt "
        f"and {len(completion.tokens)} generated tokens before it), got NaN or an infinity; a "
        "weight is not finite, or activations overflow",
        generation,
    )
