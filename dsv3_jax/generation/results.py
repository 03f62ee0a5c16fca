"""Log-probabilities and the completion of one request, on the host."""

from __future__ import annotations

import numpy as np

from dsv3_jax.generation.completion import Completion, FinishReason, Speculation, TopLogprobs
from dsv3_jax.generation.finished import FULL, NON_FINITE, RUNNING, STOPPED
from dsv3_jax.generation.request import Request
from dsv3_jax.generation.text import TextTracker

FINISH_REASONS: dict[int, FinishReason] = {
    RUNNING: "interrupted",
    STOPPED: "stop",
    FULL: "length",
    NON_FINITE: "error",
}
"""Finish reason for each value of ``finished``."""


# A sampled token was possible, so that its log-probability must not be reported as -inf.
_LEAST = float(np.finfo(np.float32).min)


class Results:
    """Log-probabilities of one request's tokens."""

    def __init__(self) -> None:
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []

    def add(self, logprobs: list[float]) -> None:
        """Adds the log-probabilities of more tokens."""
        self._logprobs += [max(logprob, _LEAST) for logprob in logprobs]

    def add_top(self, count: int, top_tokens: np.ndarray, top_logprobs: np.ndarray) -> None:
        """Adds the most probable tokens in the places of T more tokens.

        Args:
          count: number of them that the request asks for, at most n.
          top_tokens: [T, n], best first.
          top_logprobs: [T, n]
        """
        for ids, values in zip(top_tokens[:, :count], top_logprobs[:, :count], strict=True):
            is_possible = np.isfinite(values)  # ids that pad the embedding have -inf
            pairs = zip(ids[is_possible].tolist(), values[is_possible].tolist(), strict=True)
            self._top_logprobs.append(list(pairs))

    def between(
        self, begin: int, end: int, request: Request
    ) -> tuple[list[float], list[TopLogprobs] | None]:
        """Returns the log-probabilities of the tokens from ``begin`` to ``end``, and the most
        probable tokens in their places if the request asks for them."""
        top = self._top_logprobs[begin:end] if request.logprobs else None
        return self._logprobs[begin:end], top

    def completion(
        self,
        request: Request,
        tracker: TextTracker,
        reason: FinishReason,
        speculation: Speculation | None,
    ) -> Completion:
        """Returns the completion with the tokens and text of ``tracker``."""
        logprobs, top_logprobs = self.between(0, len(tracker.tokens), request)
        return Completion(
            text=tracker.text,
            tokens=list(tracker.tokens),
            logprobs=logprobs,
            finish_reason=reason,
            prompt_tokens=len(request.prompt),
            top_logprobs=top_logprobs,
            speculation=speculation,
        )


def not_started(request: Request) -> Completion:
    """Returns the completion of a request that never ran."""
    return Results().completion(request, TextTracker(None, ()), "interrupted", None)
