"""Sends a trace of requests to an engine, and measures latency and throughput."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import numpy as np

from dsv3_jax.engine import Engine, EngineRequest
from dsv3_jax.traces import Trace

POLL_SECONDS = 0.05
PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True)
class Replay:
    """Results of a replayed trace."""

    seconds: float
    """From the first submission to the last token."""
    requests: list[EngineRequest]
    stats: dict[str, Any]
    """The engine's figures at the end."""

    def summary(self) -> dict[str, Any]:
        """Returns throughput in tokens per second, and percentiles of latencies in milliseconds.

        TTFT is the time from submission to the first token, TPOT the mean time between two later
        tokens of a request.
        """
        completions = [request.result() for request in self.requests]
        outputs = [len(completion.tokens) for completion in completions]
        ttft = [request.times.first_token - request.times.submitted for request in self.requests]
        tpot = [
            (request.times.end - request.times.first_token) / (count - 1)
            for request, count in zip(self.requests, outputs, strict=True)
            if count > 1
        ]
        return {
            "requests": len(completions),
            "seconds": round(self.seconds, 3),
            "prompt_tokens": sum(completion.prompt_tokens for completion in completions),
            "cached_tokens": sum(completion.cached_tokens for completion in completions),
            "output_tokens": sum(outputs),
            "output_tokens_per_second": round(sum(outputs) / self.seconds, 1),
            "ttft_ms": _percentiles(ttft),
            "tpot_ms": _percentiles(tpot),
            "engine": self.stats,
        }


def replay(
    engine: Engine,
    trace: Trace,
    *,
    rate: float | None,
    count: int | None = None,
    vocab_size: int,
    scale: float = 1.0,
) -> Replay:
    """Submits the requests of a trace and waits for all of them.

    Every request generates exactly its number of output tokens, greedily.

    Args:
      rate: requests per second, by the trace's own arrival times; None submits all at once.
      count: number of requests; None takes all.
      scale: factor of prompt and output lengths, for small models.
    """
    chosen = trace.requests[:count]
    prompts, outputs = lengths_scaled(trace, count, vocab_size, scale)
    arrivals = [0.0 if rate is None else request.unit_arrival / rate for request in chosen]
    before = engine.stats()
    began = time.monotonic()
    requests: list[EngineRequest] = []
    while len(requests) < len(chosen) or not all(request.is_done for request in requests):
        now = time.monotonic() - began
        while len(requests) < len(chosen) and arrivals[len(requests)] <= now:
            i = len(requests)
            requests.append(
                engine.submit(
                    prompts[i], max_new_tokens=outputs[i], ignore_eos=True, temperature=0.0
                )
            )
        due = arrivals[len(requests)] if len(requests) < len(chosen) else math.inf
        time.sleep(min(max(due - (time.monotonic() - began), 0.0), POLL_SECONDS))
    end = max(request.times.end for request in requests)
    stats = engine.stats().since(before)
    return Replay(end - began, requests, stats.as_json())


def lengths_scaled(
    trace: Trace, count: int | None, vocab_size: int, scale: float
) -> tuple[list[list[int]], list[int]]:
    """Returns the prompts of the first ``count`` requests, or of all, and their numbers of output
    tokens, at least one of each, with all lengths multiplied by ``scale``."""
    chosen = trace.requests[:count]
    prompts = [trace.prompt(i, vocab_size) for i in range(len(chosen))]
    prompts = [prompt[: max(1, round(scale * len(prompt)))] for prompt in prompts]
    return prompts, [max(1, round(scale * request.output_tokens)) for request in chosen]


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.percentile(seconds, PERCENTILES) * 1e3
    return {f"p{p}": round(float(v), 2) for p, v in zip(PERCENTILES, values, strict=True)}
