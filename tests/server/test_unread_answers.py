"""Clients that stop reading lose their requests; slow ones get all of their answers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop

from dsv3_jax.engine import EngineRequest
from dsv3_jax.generation.completion import Completion
from dsv3_jax.server.connection_limits import UnreadAnswers, unread_bytes
from tests.server.conftest import RunningServer, running
from tests.server.scripted import ScriptedEngine, family_tokenizer

SECONDS = 30


class Transport:
    """One whose unread bytes the test sets."""

    def __init__(self, size: int):
        self.size = size
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.size

    def get_extra_info(self, name: str) -> None:
        assert name == "socket"

    def abort(self) -> None:
        self.is_aborted = True


def watch(*transports: Transport, seconds: float = 600.0) -> UnreadAnswers:
    connections: Any = list(transports)
    return UnreadAnswers(lambda: connections, seconds)


def test_a_client_that_takes_nothing_for_too_long(caplog):
    transport, other = Transport(5), Transport(7)
    it = watch(transport, other)
    with caplog.at_level(logging.WARNING, "dsv3_jax.server"):
        for i in range(600):  # the first look only sees the number
            it.look()
            other.size = 7 + i // 599  # it has taken something just in time
        assert not transport.is_aborted
        assert not caplog.records
        it.look()
    assert transport.is_aborted
    assert not other.is_aborted
    (record,) = caplog.records
    assert record.getMessage() == (
        "closing a connection: its client has taken none of 5 bytes for 600 s"
    )


def test_a_slow_client_and_one_that_has_read_everything_stay():
    slow, done = Transport(10**6), Transport(0)
    it = watch(slow, done, seconds=10.0)
    for i in range(1000):
        slow.size -= not i % 9
        it.look()
    assert not slow.is_aborted
    assert not done.is_aborted
    assert len(it._unread) == 1


def test_closed_connections_are_forgotten():
    connections: Any = [Transport(3)]
    it = UnreadAnswers(lambda: connections, 600.0)
    it.look()
    connections.clear()
    it.look()
    assert not it._unread


def test_bytes_in_the_kernel_count():
    """asyncio's own buffer alone changes too rarely with a slow client."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
        with sender, receiver:
            sender.setblocking(False)
            sent = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    sent += sender.send(b"x" * 2**16)

            class SocketTransport(Transport):
                def get_extra_info(self, name: str) -> Any:
                    return sender

            transport: Any = SocketTransport(11)
            before = unread_bytes(transport)
            assert 11 < before <= 11 + sent
            receiver.setblocking(True)
            while unread_bytes(transport) == before:
                assert receiver.recv(2**16)
            assert unread_bytes(transport) < before


PIECE = "0123456789abcde\n" * 128
PIECES = 300


@dataclasses.dataclass
class EndlessEngine(ScriptedEngine):
    """Its requests gain many pieces at once, and end when the test or the server says so."""

    handles: queue.Queue[EngineRequest] = dataclasses.field(default_factory=queue.Queue)
    cancelled: queue.Queue[EngineRequest] = dataclasses.field(default_factory=queue.Queue)

    def submit_all(self, prompts: Any, *, n: int = 1, **settings: Any) -> list[EngineRequest]:
        handle = EngineRequest(self.cancelled.put)
        for _ in range(PIECES):
            handle.deliver(PIECE, [1], [0.0], None)
        self.handles.put(handle)
        return [handle]


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def endless(request, tmp_path_factory) -> Iterator[tuple[RunningServer, EndlessEngine]]:
    """A server in each of the event loops that it may have, whose connections differ."""
    tokenizer = family_tokenizer(tmp_path_factory.mktemp("tokenizer"), "deepseek-v3.1")
    engine: Any = EndlessEngine(tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "uvloop":
            patch.setattr(asyncio, "new_event_loop", uvloop.new_event_loop)
        with running(engine, tokenizer, unread_seconds=1.0) as server:
            assert type(server.loop).__module__.startswith(request.param)
            yield server, engine


@contextlib.contextmanager
def stream(server: RunningServer) -> Iterator[http.client.HTTPResponse]:
    """Yields a response whose client has a small buffer in the kernel."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
    connection.sock = socket.socket()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    connection.sock.settimeout(SECONDS)
    connection.sock.connect(("127.0.0.1", server.port))
    body = {"model": "demo", "prompt": "x", "stream": True}
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        yield connection.getresponse()


def test_the_request_of_a_client_that_stops_reading_is_cancelled(endless):
    server, engine = endless
    with stream(server) as response:
        assert response.status == 200
        began = time.monotonic()
        handle = engine.handles.get(timeout=SECONDS)
        assert engine.cancelled.get(timeout=SECONDS) is handle
        assert time.monotonic() - began > 0.9
        assert server.service.admission.open == 0
        with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
            response.read()


def test_a_slow_client_gets_everything(endless):
    server, engine = endless
    with stream(server) as response:
        handle = engine.handles.get(timeout=SECONDS)
        tokens = [1] * PIECES
        end = Completion(PIECE * PIECES, tokens, [0.0] * PIECES, "stop", prompt_tokens=1)
        timer = threading.Timer(1.0, handle.deliver, ("", [], [], None, end))
        timer.start()
        began, parts = time.monotonic(), []
        while part := response.read1(8192):
            parts.append(part)
            time.sleep(0.01)
        timer.join()
    assert time.monotonic() - began > 2 * server.service.settings.unread_seconds
    events = b"".join(parts).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert "".join(choice["text"] for choice in choices) == PIECE * PIECES
    assert choices[-1]["finish_reason"] == "stop"
    assert engine.cancelled.empty()
