"""Two loads: requests sent at their arrival times, or a number of them at a time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from dsv3_jax.client.completions import RequestRecord

Send = Callable[[int], Awaitable[RequestRecord]]
"""Sends the request with this number and waits for its end."""


async def open_loop(send: Send, arrivals: Sequence[float]) -> list[RequestRecord]:
    """Sends each request at its arrival time, whether or not earlier ones have ended.

    Args:
      arrivals: seconds after the beginning, in ascending order.
    """
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
    """Returns a short description of a load."""
    if concurrency is not None:
        return f"{concurrency} at a time"
    assert rate is not None
    return "all at once" if math.isinf(rate) else f"{rate:g} per second"
