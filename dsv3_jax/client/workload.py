"""The requests of a trace, fitted to the served model; two ways to send them; and the results:
throughput and latencies, with the field names and definitions of ``vllm bench serve``.

TTFT is the time from sending a request to its first chunk of text, ITL the time between two chunks,
E2EL the time to the last chunk, and TPOT the time after the first chunk per later token. A chunk
has several tokens if drafts were accepted, so ITL and TPOT then differ.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

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


_PERCENTILES = (50, 90, 99)


def results(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Returns the figures of all requests. Latencies are those of the requests that succeeded."""
    ended = [record for record in records if not record.error]
    last = max((r.start + r.chunks[-1] for r in records if r.chunks), default=math.nan)
    duration = last - min((record.start for record in records), default=math.nan)
    inputs = sum(record.prompt_tokens for record in ended)
    outputs = sum(record.output_tokens for record in ended)
    return {
        "duration": duration,
        "completed": len(ended),
        "failed": len(records) - len(ended),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(ended) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "max_concurrent_requests": _most_at_a_time(records),
        **_latencies(ended),
    }


def details(records: Sequence[RequestRecord]) -> dict[str, Any]:
    return {
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "start_times": [record.start for record in records],
        "ttfts": [record.chunks[0] if record.chunks else 0.0 for record in records],
        "itls": [np.diff(record.chunks).tolist() for record in records],
        "errors": [record.error for record in records],
    }


def _latencies(ended: Sequence[RequestRecord]) -> dict[str, float]:
    """Returns statistics of each kind of latency in milliseconds."""
    seconds = {
        "ttft": [record.chunks[0] for record in ended],
        "tpot": [
            (record.chunks[-1] - record.chunks[0]) / (record.output_tokens - 1)
            for record in ended
            if record.output_tokens > 1
        ],
        "itl": [gap for record in ended for gap in np.diff(record.chunks).tolist()],
        "e2el": [record.chunks[-1] for record in ended],
    }
    figures: dict[str, float] = {}
    for name, values in seconds.items():
        ms = 1e3 * np.asarray(values or [0.0])
        figures[f"mean_{name}_ms"] = float(ms.mean())
        figures[f"median_{name}_ms"] = float(np.median(ms))
        figures[f"std_{name}_ms"] = float(ms.std())
        for p in _PERCENTILES:
            figures[f"p{p}_{name}_ms"] = float(np.percentile(ms, p))
    return figures


def _most_at_a_time(records: Sequence[RequestRecord]) -> int:
    """Returns the largest number of requests that were open at one time."""
    events = [(record.start, 1) for record in records]
    events += [(r.start + (r.chunks[-1] if r.chunks else 0.0), -1) for r in records]
    return int(max(np.cumsum([change for _, change in sorted(events)]), default=0))
