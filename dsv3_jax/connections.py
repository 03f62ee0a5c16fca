"""Connections of multiprocessing between this project's processes."""

from __future__ import annotations

import contextlib
import os
import socket
from multiprocessing.connection import Connection


def hang_up(connection: Connection) -> None:
    """Ends a connection, also for threads that read from it or send. Both sides notice the end."""
    with (
        contextlib.suppress(OSError),  # the other side has ended it
        socket.socket(fileno=os.dup(connection.fileno())) as copy,
    ):
        copy.shutdown(socket.SHUT_RDWR)
