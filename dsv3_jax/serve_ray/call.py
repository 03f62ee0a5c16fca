"""One HTTP request on its way from a front to a replica, and its answer on the way back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from dsv3_jax.server.errors import endpoint_path

logger = logging.getLogger(__name__)

REPLICA_HEADER = b"x-replica-id"  # header of every answer with the id of the replica that gave it

_SENT_KEYS = ("type", "http_version", "method", "scheme", "query_string", "client", "server")


class EngineFailedError(Exception):
    """The engine of a replica failed before a call had an answer."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A request with its whole body. It can be sent again to another replica."""

    scope: Mapping[str, Any]  # ASGI's, without what belongs to the front's process
    body: bytes
    prefix_key: bytes | None  # key that it shares with requests that have the same prefix
    avoid: frozenset[str] = frozenset()  # replicas that could not serve it

    @classmethod
    def of(cls, scope: Scope, body: bytes, prefix_key: bytes | None) -> Call:
        """Returns a call for the request with an ASGI scope. Its path is that of the endpoint,
        wherever the application is mounted."""
        sent = {name: scope[name] for name in _SENT_KEYS if name in scope}
        headers = list(scope["headers"])
        return cls({**sent, "path": endpoint_path(scope), "headers": headers}, body, prefix_key)

    def avoiding(self, replica: str) -> Call:
        """Returns the same call for another replica than this one."""
        return dataclasses.replace(self, avoid=self.avoid | {replica})


async def answer(app: ASGIApp, call: Call, replica: str) -> AsyncGenerator[list[Message], None]:
    """Runs an application for one call, and yields the messages of its response.

    Nothing is yielded before the response has something of the answer: a part of its body, which of
    generated text is its first token. Until then the caller can send the call to another replica.

    Closing the iterator tells the application that the client has gone away.
    """
    messages: list[Message] = []
    has_news = asyncio.Event()
    body: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]
    state: dict[str, Any] = {}
    scope = {**call.scope, "asgi": {"version": "3.0"}, "state": state}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"], (REPLICA_HEADER, replica.encode())]
            message = {**message, "headers": headers}
        messages.append(message)
        has_news.set()

    async def receive() -> Message:
        if body:
            return body.pop()
        await asyncio.Future()  # a client that goes away cancels the application
        raise AssertionError

    task = asyncio.create_task(app(scope, receive, send))  # pyright: ignore[reportArgumentType]
    task.add_done_callback(lambda _: has_news.set())
    try:
        has_begun = has_sent = False
        while not task.done() or messages:
            await has_news.wait()
            has_news.clear()
            has_begun = has_begun or task.done() or _has_answer(messages, state)
            if has_begun and messages:
                has_sent = True
                # More can come while the caller has this batch.
                batch, messages[:] = messages.copy(), []
                yield batch
        if (error := task.exception()) is not None:
            if not has_sent:
                raise error
            # The client has the response to it, which the application's own handler sent.
            logger.error("error of the application", exc_info=error)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(task, return_exceptions=True)


def _has_answer(messages: list[Message], state: Mapping[str, Any]) -> bool:
    """Returns whether a response has a part of its body, and its request a token if it generates
    text."""
    bodies = [message for message in messages if message["type"] == "http.response.body"]
    job = state.get("job")
    if job is None or any(not message.get("more_body") for message in bodies):
        return bool(bodies)
    return any(not math.isnan(h.times.first_token) for h in job.handles)
