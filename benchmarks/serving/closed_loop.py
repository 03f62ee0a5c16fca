"""Compares concurrent requests with requests one after the other, on one warm engine."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dsv3_jax.engine import Engine


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Throughput of both arms in output tokens per second, round by round."""

    concurrency: int
    requests: int
    """Requests of each arm in a round."""
    output_tokens: int
    """Tokens that they generate together."""
    concurrent: list[float]
    sequential: list[float]

    @property
    def ratios(self) -> list[float]:
        """Throughput of the concurrent arm divided by that of the sequential arm."""
        return [a / b for a, b in zip(self.concurrent, self.sequential, strict=True)]

    def summary(self) -> dict[str, Any]:
        """Returns medians and all rounds."""
        return {
            "concurrency": self.concurrency,
            "requests": self.requests,
            "output_tokens": self.output_tokens,
            "concurrent_tokens_per_second": round(statistics.median(self.concurrent), 1),
            "sequential_tokens_per_second": round(statistics.median(self.sequential), 1),
            "ratio": round(statistics.median(self.ratios), 3),
            "ratios": [round(ratio, 3) for ratio in self.ratios],
        }


def compare(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    concurrency: int,
    rounds: int,
) -> Comparison:
    """Serves all prompts ``concurrency`` at a time and one at a time, alternately.

    A round before the first one is not counted. Every arm begins with an empty prefix cache.

    Raises:
      ValueError: a greedy completion differs between both arms.
    """
    concurrent, sequential = [], []
    for number in range(rounds + 1):
        arms = {}
        # The arm that comes first changes, so that a drifting clock rate favours neither.
        for clients in (concurrency, 1) if number % 2 else (1, concurrency):
            engine.clear_prefix_cache()
            arms[clients] = serve(engine, prompts, new_tokens, clients)
        for i, (one, other) in enumerate(zip(arms[concurrency][1], arms[1][1], strict=True)):
            if one != other:
                raise ValueError(f"prompt {i}: expected {other} as alone, got {one}")
        if number:
            total = new_tokens * len(prompts)
            concurrent.append(total / arms[concurrency][0])
            sequential.append(total / arms[1][0])
    return Comparison(concurrency, len(prompts), new_tokens * len(prompts), concurrent, sequential)


def serve(
    engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int, clients: int
) -> tuple[float, list[list[int]]]:
    """Serves prompts with clients that wait for one completion before they submit the next prompt.

    Returns the seconds it took, and the greedy tokens of each completion.
    """

    def ask(prompt: Sequence[int]) -> list[int]:
        request = engine.submit(list(prompt), max_new_tokens=new_tokens, ignore_eos=True)
        return request.result().tokens

    with ThreadPoolExecutor(clients) as pool:
        began = time.perf_counter()
        tokens = list(pool.map(ask, prompts))
        return time.perf_counter() - began, tokens
