"""Log-probabilities and the completion of one request, kept on the host."""

from __future__ import annotations

import numpy as np

from dsv3_jax.generation.completion import Completion, FinishReason, Speculation
from dsv3_jax.generation.request import Request
from dsv3_jax.generation.state import FULL, NOT_FINITE, RUNNING, STOPPED
from dsv3_jax.generation.text import TextTracker

FINISH_REASONS: dict[int, FinishReason] = {
    RUNNING: "interrupted",
    STOPPED: "stop",
    FULL: "length",
    NOT_FINITE: "error",
}


class Results:
    """What came with a request's tokens, on the host."""

    def __init__(self) -> None:
        self._logprobs: list[float] = []
        self._top: list[list[tuple[int, float]]] = []

    def add(
        self, count: int, logprobs: np.ndarray, top_tokens: np.ndarray, top_logprobs: np.ndarray
    ) -> None:
        """Of more tokens: logprobs [T], and ids and log-probabilities [T, n], best first, of which
        ``count`` are asked for."""
        # Not below float32's least number: a token that was sampled was possible.
        self._logprobs += np.maximum(logprobs, np.finfo(np.float32).min).tolist()
        for ids, values in zip(top_tokens[:, :count], top_logprobs[:, :count], strict=True):
            possible = np.isfinite(values)  # ids that only pad the embedding are not
            pairs = zip(ids[possible].tolist(), values[possible].tolist(), strict=True)
            self._top.append(list(pairs))

    def completion(
        self,
        request: Request,
        tracker: TextTracker,
        reason: FinishReason,
        speculation: Speculation | None,
    ) -> Completion:
        count = len(tracker.tokens)
        return Completion(
            text=tracker.text,
            tokens=list(tracker.tokens),
            logprobs=self._logprobs[:count],
            finish_reason=reason,
            prompt_tokens=len(request.prompt),
            top_logprobs=self._top[:count] if request.logprobs else None,
            speculation=speculation,
        )


def not_begun(request: Request) -> Completion:
    """The completion of a request that never ran."""
    return Results().completion(request, TextTracker(None, ()), "interrupted", None)
