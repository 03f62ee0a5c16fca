"""Answers that their clients do not read: after a while, the connection is closed.

Such a client would keep its place in the queue, its requests and their text for ever. It is told
from a slow one by the bytes that it has not taken yet, in the buffers of the process and of the
kernel: if their number does not change, it takes nothing. This says more than the time of a single
write, which has to wait until a slow client has taken a whole buffer.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import struct
import termios
from collections.abc import Callable, Iterable
from typing import NamedTuple

logger = logging.getLogger(__name__)

_LOOKS = 10  # within the time


class _Unread(NamedTuple):
    size: int
    """Bytes that the client has not taken."""
    looks: int
    """Looks since this number last changed."""


class UnreadAnswers:
    """Closes connections whose clients take nothing for too long.

    It counts looks instead of reading a clock: if the server itself was paused, with its machine or
    its container, that time does not count.

    Args:
      transports: returns those of all connections.
      seconds: longest time in which a client may take nothing.
    """

    def __init__(self, transports: Callable[[], Iterable[asyncio.Transport]], seconds: float):
        self._transports = transports
        self._interval = min(1.0, seconds / _LOOKS)
        self._most_looks = round(seconds / self._interval)
        self._seconds = seconds
        self._unread: dict[asyncio.Transport, _Unread] = {}

    async def run(self) -> None:
        """Looks until it is cancelled."""
        while True:
            await asyncio.sleep(self._interval)
            self.look()

    def look(self) -> None:
        """Looks at all connections once."""
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
