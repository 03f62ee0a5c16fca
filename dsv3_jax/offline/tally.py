"""Completions and statistics of one call of the Generator."""

from __future__ import annotations

import time

from dsv3_jax.generation.completion import Generation, Speculation, Stats
from dsv3_jax.generation.errors import NonFiniteLogitsError
from dsv3_jax.offline.call import Call
from dsv3_jax.words import counted


class Tally:
    """Statistics of a call so far.

    Args:
      began: ``time.perf_counter()`` at the start of the call.
      n: number of requests per prompt.
    """

    def __init__(self, call: Call, began: float, n: int = 1):
        self._call = call
        self._began = began
        self._n = n
        self._first_at: float | None = None  # when the first tokens were read
        self._first_tokens = 0
        self._last_at = began

    def update(self) -> None:
        """Takes the time after a dispatch."""
        self._last_at = time.perf_counter()
        if self._first_at is None and (tokens := self._call.new_tokens):
            self._first_at, self._first_tokens = self._last_at, tokens

    def generation(self) -> Generation:
        """Returns a completion for every request. Requests that have not started have no tokens."""
        completions = self._call.completions()
        new_tokens = sum(len(c.tokens) for c in completions)
        first_at = self._first_at or self._began
        later_tokens, later_seconds = new_tokens - self._first_tokens, self._last_at - first_at
        return Generation(
            completions,
            Stats(
                steps=self._call.pace.steps,
                new_tokens=new_tokens,
                time_to_first_token=first_at - self._began,
                seconds=time.perf_counter() - self._began,
                tokens_per_second=later_tokens / later_seconds if later_tokens > 0 else 0.0,
                speculation=Speculation.total([c.speculation for c in completions]),
            ),
        )

    def raise_non_finite(self) -> None:
        """Raises NonFiniteLogitsError if a request ended because its logits were not finite."""
        if not (numbers := self._call.non_finite):
            return
        generation = self.generation()
        completion = generation[numbers[0]]
        others = f" (and {counted(len(numbers) - 1, 'other sequence')})" if numbers[1:] else ""
        raise NonFiniteLogitsError(
            f"prompt {numbers[0] // self._n}{others}: expected finite logits for position "
            f"{completion.prompt_tokens + len(completion.tokens)} ({completion.prompt_tokens} "
            f"prompt and {len(completion.tokens)} generated tokens before it), got NaN or an "
            "infinity; a weight is not finite, or activations overflow",
            generation,
        )
