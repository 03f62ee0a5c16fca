"""Requests whose clients go away, or that fail, at any moment: nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

import dsv3_jax
from dsv3_jax.engine import EngineRequest
from dsv3_jax.server.job import Job
from dsv3_jax.server.prefill import PrefillCounts, _Answer
from dsv3_jax.server.service import ServerSettings, Service
from dsv3_jax.server.sse import EventFormat, EventStream
from dsv3_jax.tokenizer import Tokenizer
from tests.server.scripted import ScriptedEngine

SECONDS = 30


def run(work: Any) -> Any:
    """Runs a coroutine, which must not hang."""
    return asyncio.run(asyncio.wait_for(work, SECONDS))


async def never() -> Any:
    await asyncio.Future()


def test_a_client_that_goes_away_during_the_submission_leaves_no_request():
    submitting, go, cancelled = threading.Event(), threading.Event(), threading.Event()

    class SlowEngine(ScriptedEngine):
        def submit_all(self, prompts: Any, *, n: int = 1, **settings: Any) -> list[EngineRequest]:
            submitting.set()
            assert go.wait(SECONDS)
            return [EngineRequest(lambda request: cancelled.set())]

    tokenizer = Tokenizer(Path(dsv3_jax.__file__).parent / "demo")
    engine: Any = SlowEngine(tokenizer)

    async def work() -> Service:
        service = Service(engine, tokenizer, ServerSettings("demo", 256, 12))
        service.is_ready = True
        task = asyncio.create_task(
            service.submit(lambda: ["x"], 1, n=1, prompt_field="prompt", max_new_tokens=1)
        )
        await asyncio.to_thread(submitting.wait, SECONDS)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        go.set()
        await asyncio.to_thread(cancelled.wait, 5)
        await service.close()
        return service

    service = run(work())
    assert cancelled.is_set()
    assert service.admission.open == 0
    assert b'finished_reason="abort",model_name="demo"} 1.0' in service.metrics.text()


def test_an_unknown_error_of_one_completion_ends_the_stream_of_several():
    handles = [EngineRequest(lambda request: None) for _ in range(2)]

    async def read() -> None:
        async for _ in Job(handles, lambda job: None).pieces():
            pass

    handles[1].fail(LookupError("unknown"))
    with pytest.raises(LookupError, match="unknown"):
        run(read())


class Event(BaseModel):
    """An event of a stream."""


def test_a_stream_is_closed_although_its_events_fail_to_end():
    closed = []

    async def events() -> AsyncGenerator[BaseModel, None]:
        try:
            yield Event()
        finally:
            raise LookupError("in the end")

    async def send(message: Any) -> None:
        await never()

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def work() -> None:
        begun = events()
        await anext(begun)
        stream = EventStream(begun, lambda: closed.append(True), EventFormat())
        with pytest.raises(LookupError, match="in the end"):
            await stream({"type": "http"}, receive, send)

    run(work())
    assert closed == [True]


class Lease:
    def __init__(self):
        self.is_closed = threading.Event()

    def offer(self, records: Any) -> list[bytes]:
        return [b"frame"]

    def close(self) -> None:
        self.is_closed.set()


def test_a_decode_server_that_reads_nothing_costs_nothing_after_its_time():
    records: Future[list[Any]] = Future()
    records.set_result([SimpleNamespace(num_bytes=1)])
    lease, counts, closed = Lease(), PrefillCounts(), []
    prefills: Any = SimpleNamespace(
        counts=counts,
        engine=None,
        store=SimpleNamespace(lookup=len, fetch=lambda addresses: records),
    )
    sender: Any = SimpleNamespace(keeps_records=False, lease=lambda: lease)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await never()

    async def work() -> None:
        job = Job([EngineRequest(lambda request: None)], closed.append)
        addresses: Any = ["page"]
        answer = _Answer(prefills, job, addresses, sender, time.monotonic() + 0.05)
        task = asyncio.create_task(answer({"type": "http"}, never, send))
        assert await asyncio.to_thread(lease.is_closed.wait, 5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert closed == [job]

    run(work())
    assert (counts.open_answers, counts.interrupted) == (0, 1)
