"""Streams of server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsv3_jax.server.errors import ApiError, engine_failed

T = TypeVar("T")


class NamedEvent(BaseModel):
    """An event with a name. Its further fields depend on its type."""

    model_config = ConfigDict(extra="allow")

    type: str

    @classmethod
    def of(cls, kind: str, **fields: Any) -> NamedEvent:
        """Returns an event with these fields."""
        return cls(type=kind, **fields)


class ResponseEvent(NamedEvent):
    """An event of /v1/responses."""

    sequence_number: int


class EventFormat:
    """OpenAI's format of a stream: events have no names, and the last one is ``[DONE]``."""

    end = "data: [DONE]\n\n"

    def event(self, event: BaseModel) -> str:
        return f"data: {event.model_dump_json()}\n\n"

    def error(self, error: ApiError) -> str:
        return self.event(error.body)


class NamedEventFormat(EventFormat):
    """Events that are named like their field ``type``. The stream has no further end."""

    end = ""

    def __init__(self, make_error: Callable[[ApiError], NamedEvent]):
        self._make_error = make_error

    def event(self, event: BaseModel) -> str:
        assert isinstance(event, NamedEvent)
        return f"event: {event.type}\n{super().event(event)}"

    def error(self, error: ApiError) -> str:
        return self.event(self._make_error(error))


CLIENT_GONE = 499
"""Status in the log of a request whose client went away. Nobody receives it."""

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""The part of OpenAPI's description of an endpoint that says that it may stream."""


class EventStream(Response):
    """A response of server-sent events that ends when its client goes away. An error of the events
    becomes the last one. ``close`` is called at the end, however the stream ends."""

    def __init__(
        self,
        events: AsyncGenerator[BaseModel, None],
        close: Callable[[], None],
        event_format: EventFormat,
    ):
        super().__init__(media_type="text/event-stream")
        self.headers["cache-control"] = "no-store"
        self.headers["x-accel-buffering"] = "no"
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._format = event_format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await first_of(self._send(send), disconnected(receive))
        finally:
            try:
                await self._events.aclose()
            finally:
                self._close()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})

        async def send_event(text: str) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        try:
            async for event in self._events:
                await send_event(self._format.event(event))
        except ApiError as error:
            await send_event(self._format.error(error))
        except Exception as error:
            await send_event(self._format.error(engine_failed(error)))
            raise
        await send_event(self._format.end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Returns the result of ``work``. If the client goes away first, cancels it and returns a
    response that nobody will read."""
    finished = await first_of(work, disconnected(request.receive))
    return Response(status_code=CLIENT_GONE) if finished is None else finished


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of ``work``, which is not None. If the client goes away first, cancels it
    and raises ApiError."""
    finished = await first_of(work, disconnected(request.receive))
    if finished is None:
        raise ApiError(CLIENT_GONE, "request: the client has gone away")
    return finished


async def first_of(work: Coroutine[Any, Any, Any], interruption: Coroutine[Any, Any, None]) -> Any:
    """Returns the result of ``work``, or None if ``interruption`` ends before it."""
    tasks = [asyncio.create_task(work), asyncio.create_task(interruption)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Waits until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
