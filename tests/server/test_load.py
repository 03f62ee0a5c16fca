"""Many clients at once: bounds of the queue, and nothing left of clients that vanish."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from collections import Counter

import aiohttp
import pytest

CLIENTS = 500
PATHS = {
    "/v1/completions": {"prompt": "def f("},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "def f("}]},
}


def session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


def test_overload(server):
    """Two requests may be open. The other eight are refused at once, with the time to come back."""
    body = {"model": "demo", "prompt": "x", "max_tokens": 40, "ignore_eos": True}

    async def ask(client: aiohttp.ClientSession) -> tuple[int, str | None, dict]:
        async with client.post(f"{server.url}/v1/completions", json=body) as response:
            return response.status, response.headers.get("Retry-After"), await response.json()

    async def ask_all() -> list[tuple[int, str | None, dict]]:
        async with session() as client:
            return await asyncio.gather(*(ask(client) for _ in range(10)))

    with server.limited(2):
        answers = asyncio.run(ask_all())
    assert sorted(status for status, _, _ in answers) == [200, 200] + [503] * 8
    for status, retry_after, content in answers:
        if status == 503:
            assert (retry_after, content["error"]["code"]) == ("1", "overloaded")


def left(server) -> Counter[str]:
    """Counts what exists while the server is idle."""
    server.wait_until_idle()
    handles = 0
    for _ in range(200):  # connections, cancelled tasks and handles end a little later
        gc.collect()
        handles = sum(type(each).__name__ in ("EngineRequest", "Job") for each in gc.get_objects())
        if server.tasks() <= 3 and not handles:
            break
        time.sleep(0.02)
    server.engine.check_integrity()
    stats = server.engine.stats()
    return Counter(
        tasks=server.tasks(),
        files=len(os.listdir("/proc/self/fd")),
        handles=handles,
        pages=round(1e6 * stats.cache_usage),
        slots=stats.running + stats.waiting,
        open=server.service.admission.open,
    )


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_nothing_is_left_of_500_clients(server):
    """A third vanish in the middle of their streams, some before the first token."""

    async def client(i: int, http: aiohttp.ClientSession) -> int:
        path = list(PATHS)[i % 2]
        body = {"model": "demo", "max_tokens": 3, "stream": True, "ignore_eos": True, "seed": i}
        chunks = 0
        async with http.post(server.url + path, json=body | PATHS[path]) as response:
            assert response.status == 200
            async for line in response.content:
                if i % 3 == 0 and chunks >= i % 4:
                    return -1  # which closes the connection
                if line.startswith(b"data: {"):
                    assert "error" not in json.loads(line[6:])
                    chunks += 1
        return chunks

    async def all_clients(count: int) -> list[int]:
        async with session() as http:
            return await asyncio.gather(*(client(i, http) for i in range(count)))

    with server.limited(CLIENTS):
        asyncio.run(all_clients(12))  # fills caches
        before = left(server)
        chunks = asyncio.run(all_clients(CLIENTS))
    assert sum(count < 0 for count in chunks) == len(range(0, CLIENTS, 3))
    assert all(count < 0 or count >= 2 for count in chunks)
    assert left(server) == before
    assert before["pages"] == before["slots"] == before["open"] == before["handles"] == 0
