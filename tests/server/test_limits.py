"""Limits of what comes before a body, of text, and of what waits for what; and whose text may
appear where."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dsv3_jax import tokenizer as tokenizers
from dsv3_jax.engine import EngineRequest
from dsv3_jax.generation.completion import Piece
from dsv3_jax.server import middleware
from dsv3_jax.server.access_log import LineFormatter
from dsv3_jax.server.connection_limits import MAX_BYTES, MAX_HEADERS
from dsv3_jax.server.errors import ApiError
from dsv3_jax.server.page import drafts
from dsv3_jax.server.parsers.tool_parser import Content
from dsv3_jax.words import one_line
from tests.server.conftest import RunningServer, running
from tests.server.processes import ServerProcess
from tests.server.scripted import ScriptedEngine, family_tokenizer

BEGIN = b"GET /version HTTP/1.1\r\nHost: x\r\n"
SECONDS = 0.3


@pytest.fixture(scope="module")
def hasty(tmp_path_factory) -> Iterator[RunningServer]:
    """A server that waits briefly for headers."""
    tokenizer = family_tokenizer(tmp_path_factory.mktemp("tokenizer"), "deepseek-v3.1")
    engine = ScriptedEngine(tokenizer, text="x")
    with running(engine, tokenizer, header_seconds=SECONDS) as it:  # pyright: ignore[reportArgumentType]
        yield it


def answer(server: RunningServer, *parts: bytes, pause: float = 0.0) -> bytes:
    """Sends parts of a request, and returns what comes until the server closes the connection."""
    received = b""
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection,
        contextlib.suppress(ConnectionError),
    ):
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        while content := connection.recv(65536):
            received += content
    return received


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([b""], b""),
        ([BEGIN], b"408"),
        ([BEGIN + b"\r\n", b"GET /ver"], b"408"),  # after a whole request
        ([BEGIN + b"x: " + b"y" * (MAX_BYTES - 100)], b"408"),
        ([BEGIN + b"x: " + b"y" * MAX_BYTES], b"431"),
        ([BEGIN + b"a: b\r\n" * (MAX_HEADERS + 1)], b"431"),
        ([b"hello\r\n\r\n"], b"400"),
    ],
)
def test_headers_that_do_not_end(hasty, parts, status):
    received = answer(hasty, *parts, pause=SECONDS / 10 if len(parts) > 1 else 0)
    head, _, content = received.rpartition(b"\r\n\r\n")
    assert head.rpartition(b"HTTP/1.1 ")[2][:3] == status
    if status:
        assert json.loads(content)["error"]["type"] == "invalid_request_error"


def test_headers_that_go_on_end_too(hasty):
    """The time counts from the beginning of the headers, not from their newest byte."""
    assert answer(hasty, BEGIN, *[b"a: b\r\n"] * 40, pause=SECONDS / 10)[:12] in (
        b"",
        b"HTTP/1.1 408",
    )


def test_trailers_do_not_grow(hasty):
    begin = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    for end in (b"0\r\nx: ", b"1;x="):
        assert answer(hasty, begin, end, *[b"y" * MAX_BYTES] * 40, pause=0.001) == b""


def test_a_slow_body_and_a_slow_client_are_not_cut(hasty):
    """Only headers have this limit."""
    body = b'{"prompt": "x"}'
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    received = answer(hasty, head, body[:5], body[5:], pause=2 * SECONDS)
    assert received.startswith(b"HTTP/1.1 200")


LONG = "x" * 1_000_000
PROMPTS = [
    ("/v1/completions", {"model": "demo", "prompt": LONG}, "prompt"),
    ("/v1/completions", {"model": "demo", "prompt": ["x", LONG]}, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/chat/spans", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/v1/responses", {"input": LONG}, "input"),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2},
        "messages",
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ("/tokenize", {"prompt": LONG}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
]


@pytest.mark.parametrize(("path", "fields", "field"), PROMPTS)
def test_text_that_cannot_fit_is_not_encoded(server, monkeypatch, path, fields, field):
    def encode(*arguments):
        raise AssertionError("encoded")

    monkeypatch.setattr(tokenizers, "_encode", encode)
    status, _, content = server.request("POST", path, {"model": "demo", **fields})
    error = json.loads(content)["error"]
    assert status == 400
    expected = f"{field}: expected at most 255 tokens (max_len 256, less one to generate), got text"
    assert error["message"].startswith(expected)
    assert error.get("code", "context_length_exceeded") == "context_length_exceeded"


def test_least_tokens(server):
    """No text has fewer tokens than the bound, which is not far from that of the longest tokens."""
    tokenizer = server.tokenizer
    for text in (
        "",
        "x",
        " " * 3000,
        "\n" + " " * 44,
        "é中🎉" * 50,
        "def f(x):\n" * 99,
        "<｜User｜>",
    ):
        count = len(tokenizer.encode(text, add_special_tokens=False))
        assert tokenizer.least_tokens(text) <= count
        assert tokenizer.least_tokens(text) >= len(text.encode()) / 64


def test_calls_of_the_engine_do_not_wait_for_encoding(server):
    """All threads that encode, write answers or read bodies are busy: a request that is under way
    can still be cancelled, and figures be read."""
    may_end = threading.Event()
    service, handle = server.service, EngineRequest(lambda _: None)

    async def fill() -> list[asyncio.Task]:
        pools = ("prompts", "answers", "bodies")
        work = [service.in_thread(may_end.wait, pool) for pool in pools for _ in range(8)]
        return [asyncio.create_task(each) for each in work]

    tasks = asyncio.run_coroutine_threadsafe(fill(), server.loop).result(30)
    try:
        assert server.request("GET", "/metrics")[0] == 200
        done = asyncio.run_coroutine_threadsafe(
            service.in_thread(handle.cancel, "calls"), server.loop
        )
        done.result(30)
    finally:
        may_end.set()

    async def end() -> None:
        await asyncio.gather(*tasks)

    asyncio.run_coroutine_threadsafe(end(), server.loop).result(30)


@pytest.mark.parametrize(
    ("path", "prefix", "is_open"),
    [
        ("/page/chat.js", "", True),
        ("/page/v1/completions", "/page", False),
        ("/page/v1/models", "", False),
        ("/page/page/chat.js", "/page", True),
        ("/page/other.js", "", False),
        ("/health/v1/completions", "/health", False),
        ("/health/health", "/health", True),
        ("/health", "", True),
        ("/healthy", "", False),
        ("/pages/v1/models", "/page", False),
        ("/v1/models", "", False),
        ("/pool", "/pool", True),  # the page
        ("/pool/metrics", "/pool/", True),
    ],
)
def test_open_paths(path, prefix, is_open):
    """A prefix at which the application is mounted opens nothing."""
    reached: list[int] = []

    async def app(scope, receive, send):
        reached.append(200)

    async def send(message):
        reached.append(message.get("status"))

    scope = {"type": "http", "method": "GET", "path": path, "root_path": prefix, "headers": []}
    check = middleware.ApiKeyCheck(app, middleware.ApiKeys(["secret"]))
    asyncio.run(check(scope, None, send))  # pyright: ignore[reportArgumentType]
    assert reached[0] == (200 if is_open else 401)


@pytest.mark.parametrize(
    ("path", "prefix", "is_messages"),
    [
        ("/v1/messages", "", True),
        ("/v1/messages/count_tokens", "", True),
        ("/pool/v1/messages", "/pool", True),
        ("/v1/messages/v1/completions", "/v1/messages", False),
        ("/v1/messagesx", "", False),
    ],
)
def test_the_shape_of_errors(path, prefix, is_messages):
    scope = {"type": "http", "path": path, "root_path": prefix}
    body = json.loads(bytes(ApiError(400, "x").response(scope).body))
    assert ("type" in body) == is_messages


def test_lines_of_the_log():
    """Text from elsewhere is one line, without what controls a terminal."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("dsv3: %(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.warning("a peer says %s", 'no\r\ndsv3: ready\x1b[2J\x9b\u202e "é" \ud800')
    logger.warning("long %s", "x" * 10_000)
    try:
        raise ValueError("a\x1b[31m\nb")
    except ValueError:
        logger.exception("failed")
    first, long, failed, *traceback = stream.getvalue().splitlines()
    assert first == 'dsv3: a peer says no dsv3: ready\\x1b[2J\\x9b\\u202e "é" \\ud800'
    assert len(long) == 2000
    assert failed == "dsv3: failed"
    assert traceback[-2:] == ["ValueError: a\\x1b[31m", "b"]
    assert "\x1b" not in stream.getvalue()
    assert one_line("a  b\tc", 3) == "a b"


def test_paths_are_printable_in_errors(server):
    status, _, content = server.request("GET", "/a%0d%0ab%1b[2J")
    assert status == 404
    assert json.loads(content)["error"]["message"] == "GET /a b\\x1b[2J: Not Found"


class Counted(list):
    """A list that nobody may walk."""

    def __iter__(self):
        raise AssertionError("expected a look at the newest elements alone")


def test_drafts_are_looked_up_in_constant_time(server):
    """Each piece of an answer costs as much as its own tokens."""
    handle = EngineRequest(lambda _: None)
    accepted = [2, 3, 7, 9]
    handle.accepted_drafts = Counted(accepted)
    tokens = server.tokenizer.encode("a b c d e f g h i j k l", add_special_tokens=False)[:10]
    assert len(tokens) == 10
    shown: list[bool] = []

    class FakeJob:
        handles = (handle,)

        async def pieces(self):
            for i in range(0, 10, 2):
                part = tokens[i : i + 2]
                reason = "stop" if i == 8 else None
                text = server.tokenizer.decode(part)
                yield 0, Piece(text, part, reason, logprobs=[0.0] * 2, top_logprobs=None)

    class Parser:
        def add(self, text, *, is_last):

            return [Content(text)] if text else []

    answer = drafts._Answer.__new__(drafts._Answer)
    answer.job, answer.tokenizer, answer._parser = FakeJob(), server.tokenizer, Parser()  # pyright: ignore
    answer.final_usage = lambda: None  # pyright: ignore[reportAttributeAccessIssue]

    async def read() -> None:
        async for spans in answer.events():
            shown.extend(span.is_draft for span in spans.spans)

    asyncio.run(read())
    assert [i for i, is_draft in enumerate(shown) if is_draft] == accepted


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["run", "run_with_http_process"])
def test_sigterm_during_warm_up(runner):
    """A compilation cannot be interrupted, but it keeps nobody waiting."""
    change = "type(engine).warm_up = lambda *_: time.sleep(300)"
    with ServerProcess(change=change, runner=runner) as process:
        process.wait_for(r"http://127.0.0.1:(\d+)")
        process.wait_for("Application startup complete")
        began = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert time.monotonic() - began < 30
