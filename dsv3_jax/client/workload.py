"""The requests of a trace, fitted to the served model, and two ways to send them."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from dsv3_jax.client.completions import RequestRecord
from dsv3_jax.traces import Trace

Send = Callable[[int], Awaitable[RequestRecord]]
"""Sends the request with this number and waits for its end."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests to send."""

    trace: Trace
    prompts: list[list[int]]  # token ids of each prompt
    output_tokens: list[int]
    shortened: int  # requests that the model's length did not allow in full

    @classmethod
    def of(
        cls, trace: Trace, count: int | None, *, scale: float, max_len: int, vocab_size: int
    ) -> Workload:
        """Returns the first ``count`` requests of a trace, or all, with lengths times ``scale`` and
        ids below ``vocab_size``. One that is longer than ``max_len`` loses tokens of its output
        until half of it is left, and then the end of its prompt."""
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
        """Returns the seconds after the beginning at which each request is sent, at a mean rate per
        second; infinity sends all at once."""
        return [r.unit_arrival / rate for r in self.trace.requests[: len(self.prompts)]]


async def open_loop(send: Send, arrivals: Sequence[float]) -> list[RequestRecord]:
    """Sends each request at its arrival time, in ascending seconds after the beginning, whether or
    not earlier ones have ended."""
    began = time.perf_counter()
    tasks = []
    for i, arrival in enumerate(arrivals):
        wait = began + arrival - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(send(i)))
    return await asyncio.gather(*tasks)


async def closed_loop(send: Send, count: int, concurrency: int) -> list[RequestRecord]:
    """Sends requests from ``concurrency`` clients. Each waits for the end of its request before it
    sends the next one."""
    numbers = iter(range(count))
    records: dict[int, RequestRecord] = {}

    async def client() -> None:
        for i in numbers:
            records[i] = await send(i)

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return [records[i] for i in range(count)]


def load_name(rate: float | None, concurrency: int | None) -> str:
    if concurrency is not None:
        return f"{concurrency} at a time"
    assert rate is not None
    return "all at once" if math.isinf(rate) else f"{rate:g} per second"
