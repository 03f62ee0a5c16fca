"""Limits of connections: what comes before a request's body, and answers that clients do not read.

With httptools, uvicorn has no limit of headers: half a header would stay open for ever, and grow.
The trailers of a body in chunks have the same limits.

A client that reads nothing would keep its place in the queue, its requests and their text for ever.
It differs from a slow client in that its number of unread bytes, in the buffers of the process and
of the kernel, never changes. The time of a single write says less: it has to wait until a slow
client has taken a whole buffer.
"""

from __future__ import annotations

import asyncio
import fcntl
import http
import logging
import struct
import termios
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dsv3_jax.server.errors import ApiError

logger = logging.getLogger(__name__)

_LOOKS = 10  # within the time

MAX_BYTES = 2**16
"""Most bytes that come without completing the headers, or a part of a body."""
MAX_HEADERS = 128


class HeaderLimit(HttpToolsProtocol):
    """A connection that is closed after N ``seconds`` without a request: after it was made, and
    after each response, the headers of the next request have to be complete within this time."""

    def __init__(self, *, seconds: float, **settings: Any):
        super().__init__(**settings)
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._bytes = 0  # since the last event of the parser
        self._headers = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        super().data_received(data)
        if self._bytes > MAX_BYTES:
            self._refuse(431, f"headers: expected at most {MAX_BYTES} bytes, got more")

    def on_message_begin(self) -> None:
        self._headers = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        if self._headers > MAX_HEADERS:
            self._refuse(431, f"headers: expected at most {MAX_HEADERS}, got more")
            raise ValueError  # ends the parser
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._start_timer()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "request: expected one of HTTP/1.1, got something else")

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self._seconds, self._end)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        if self._is_answering:
            return  # a request that came before the last response; its response starts the timer
        if self._bytes:
            self._refuse(408, f"headers: expected all of them within {self._seconds:g} s")
        else:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, message: str) -> None:
        """Closes the connection, with an answer unless another one is under way."""
        if self.transport.is_closing():
            return
        if not self._is_answering:
            content = ApiError(status, message).body.model_dump_json().encode()
            lines = [
                f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}",
                "content-type: application/json",
                f"content-length: {len(content)}",
                "connection: close",
            ]
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + content)
        self.transport.close()


class _Unread(NamedTuple):
    size: int  # bytes that the client has not taken
    looks: int  # looks since this number last changed


class UnreadAnswers:
    """Closes connections whose clients take nothing for too long. It counts looks instead of
    reading a clock: time in which the server was paused, with its machine or container, does not
    count."""

    def __init__(self, transports: Callable[[], Iterable[asyncio.Transport]], seconds: float):
        self._transports = transports
        self._interval = min(1.0, seconds / _LOOKS)
        self._most_looks = round(seconds / self._interval)
        self._seconds = seconds
        self._unread: dict[asyncio.Transport, _Unread] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            self.look()

    def look(self) -> None:
        before, self._unread = self._unread, {}
        for transport in self._transports():
            size = unread_bytes(transport)
            if not size:
                continue
            last = before.get(transport)
            looks = last.looks + 1 if last is not None and last.size == size else 0
            if looks < self._most_looks:
                self._unread[transport] = _Unread(size, looks)
                continue
            logger.warning(
                "closing a connection: its client has taken none of %d bytes for %g s",
                size,
                self._seconds,
            )
            # Closing it in order would wait until the client has read the rest.
            transport.abort()


def unread_bytes(transport: asyncio.Transport) -> int:
    """Returns how many of the bytes that were written to a connection the client's side has not
    acknowledged."""
    size = transport.get_write_buffer_size()
    connection = transport.get_extra_info("socket")
    if connection is None or connection.fileno() < 0:
        return size
    try:
        answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0" * 4)
    except OSError:  # not every system tells it of sockets
        return size
    return size + struct.unpack("i", answer)[0]
