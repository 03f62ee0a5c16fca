"""The prompts and output lengths of a trace, fitted to the served model."""

from __future__ import annotations

import dataclasses

from dsv3_jax.traces import Trace


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests to send."""

    trace: Trace
    prompts: list[list[int]]
    """Token ids of each prompt."""
    output_tokens: list[int]
    """Tokens that each request generates."""
    shortened: int
    """Requests that the model's length did not allow in full."""

    @classmethod
    def of(
        cls, trace: Trace, count: int | None, *, scale: float, max_len: int, vocab_size: int
    ) -> Workload:
        """Returns the first requests of a trace.

        A request that is longer than ``max_len`` loses tokens of its output until half of
        ``max_len`` is left, and then the end of its prompt.

        Args:
          count: number of requests; None takes all.
          scale: factor of prompt and output lengths, for small models.
          max_len: most tokens of a prompt and its output together.
          vocab_size: prompts have ids below it.
        """
        prompts, outputs, shortened = [], [], 0
        for i, request in enumerate(trace.requests[:count]):
            prompt = trace.prompt(i, vocab_size)
            prompt = prompt[: max(1, round(scale * len(prompt)))]
            output = max(1, round(scale * request.output_tokens))
            fitted = min(output, max(max_len - len(prompt), max_len // 2))
            shortened += fitted < output or len(prompt) > max_len - fitted
            prompts.append(prompt[: max_len - fitted])
            outputs.append(fitted)
        return cls(trace, prompts, outputs, shortened)

    def arrivals(self, rate: float) -> list[float]:
        """Returns the seconds after the beginning at which each request is sent.

        Args:
          rate: mean requests per second; infinity sends all at once.
        """
        return [r.unit_arrival / rate for r in self.trace.requests[: len(self.prompts)]]
