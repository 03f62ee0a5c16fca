"""The front: receives requests, sends them to replicas, and tries again when a replica is lost.

It is an ASGI application without state: there can be several. It knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

import prometheus_client
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from dsv3_jax.serve_ray.call import REPLICA_HEADER, Call
from dsv3_jax.serve_ray.placement import prefix_key
from dsv3_jax.server import sse
from dsv3_jax.server.errors import ApiError, endpoint_path, overloaded, send_error
from dsv3_jax.words import one_line

_PROBES = ("/health", "/ready")

logger = logging.getLogger(__name__)

ATTEMPTS_HEADER = b"x-attempts"  # of every answer: how many replicas its request was sent to

_UNAVAILABLE = 503  # status of a replica that is full, not ready or at its end


class ReplicaLostError(Exception):
    """The replica that served a call does not exist any more, cannot be reached, or has an engine
    that failed."""


class NoReplicaError(Exception):
    """No replica can take a call now."""


Batches = AsyncGenerator[list[Message], None]  # messages in the groups in which they arrived


class Front:
    """ASGI application that relays requests to replicas.

    A request is sent to another replica if the first one answers with status 503, or is lost before
    anything of its answer has reached the client. If it is lost afterwards, the stream ends with an
    error event.

    Args:
      open_call: sends a call to one replica. Its iterator raises ReplicaLostError and
        NoReplicaError.
      metrics: returns the figures of all replicas in Prometheus' text format.
      attempts: most replicas that one request is sent to.
      probe_seconds: longest time in which a probe, such as /ready, is answered.
    """

    def __init__(
        self,
        open_call: Callable[[Call], Batches],
        metrics: Callable[[], Awaitable[bytes]],
        *,
        attempts: int,
        probe_seconds: float = 5.0,
    ):
        self._open = open_call
        self._metrics = metrics
        self._attempts = attempts
        self._probe_seconds = probe_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"expected a request over HTTP, got one of type {scope['type']}")
        body = await _read(receive)
        if body is not None:
            await sse.first_of(self._answer(scope, body, receive, send), sse.disconnected(receive))

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        path = endpoint_path(scope)
        try:
            if path == "/metrics":
                text = await self._metrics()
                await PlainTextResponse(text, media_type="text/plain")(scope, receive, send)
                return
            # In a thread, as reading a large body takes some milliseconds.
            key = await asyncio.to_thread(prefix_key, path, body)
            call = Call.of(scope, body, key)
            async with asyncio.timeout(self._probe_seconds if path in _PROBES else None):
                await self._relay(call, send)
        except TimeoutError:
            await send_error(overloaded("replicas: none is ready"), scope, receive, send)
        except NoReplicaError as error:
            await send_error(overloaded(str(error)), scope, receive, send)
        except ReplicaLostError:
            message = (
                f"request: expected an answer, lost {self._attempts} replicas; try again later"
            )
            await send_error(overloaded(message), scope, receive, send)

    async def _relay(self, call: Call, send: Send) -> None:
        """Sends a call to replicas until one answers."""
        path = call.scope["path"]
        for attempt in range(1, self._attempts + 1):
            is_last = attempt == self._attempts
            started: Message | None = None
            events, ended = 0, False
            try:
                async with contextlib.aclosing(self._open(call)) as batches:
                    async for batch in batches:
                        if started is None:
                            if batch[0]["status"] == _UNAVAILABLE and not is_last:
                                headers = Headers(raw=batch[0]["headers"])
                                call = call.avoiding(headers.get(REPLICA_HEADER.decode(), ""))
                                break
                            started = batch[0]
                            attempts = (ATTEMPTS_HEADER, str(attempt).encode())
                            started["headers"] = [*started["headers"], attempts]
                        for message in batch:
                            await send(message)
                            events += message["type"] == "http.response.body"
                            ended = message is not started and not message.get("more_body")
                    else:
                        return
            except ReplicaLostError:
                if ended:
                    return
                if started is not None:
                    await send(_last_event(path, started, events))
                    return
                if is_last:
                    raise
                shown = one_line(path, 200)
                logger.warning("lost a replica: its request for %s is sent again", shown)


def _last_event(path: str, start: Message, events: int) -> Message:
    """Returns the end of a stream whose replica was lost: an event with the error. Raises
    ConnectionError if the response is no stream of events: its connection has to be closed."""
    kind = Headers(raw=start["headers"]).get("content-type", "")
    if not kind.startswith("text/event-stream"):
        raise ConnectionError(f"{path}: the replica was lost in the middle of an answer")
    error = ApiError(
        502, "request: its replica was lost; try again", kind="server_error", code="replica_lost"
    )
    if path == "/v1/messages":
        form = sse.NamedEventFormat(
            lambda error: sse.NamedEvent.of("error", error=error.messages_body.error)
        )
    elif path == "/v1/responses":
        form = sse.NamedEventFormat(lambda error: _response_error(error, events))
    else:
        form = sse.EventFormat()
    text = form.error(error) + form.end
    return {"type": "http.response.body", "body": text.encode(), "more_body": False}


def _response_error(error: ApiError, sequence_number: int) -> sse.ResponseEvent:
    detail = error.body.error
    fields = {"message": detail.message, "code": detail.code, "param": None}
    return sse.ResponseEvent.model_validate(
        {"type": "error", "sequence_number": sequence_number, **fields}
    )


async def _read(receive: Receive) -> bytes | None:
    """Returns the body, or None if the client has gone away."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def merged(texts: Mapping[str, str]) -> bytes:
    """Returns the figures of all replicas in Prometheus' text format."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            known = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                known.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    registry = types.SimpleNamespace(collect=families.values)
    return prometheus_client.generate_latest(registry)  # pyright: ignore[reportArgumentType]
