"""HTTP in a process of its own: the same answers, errors and ends as in the engine's process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from dsv3_jax.engine import EngineError, EngineRequest, QueueFullError, RequestError
from dsv3_jax.engine.requests.request import PromptRecord
from dsv3_jax.generation.completion import Completion
from dsv3_jax.generation.errors import NonFiniteLogitsError
from dsv3_jax.server.frontend.host import EngineHost, _OpenRequest, _Outbox
from dsv3_jax.server.frontend.messages import Gain, Gains, Hello, PortableError, Reply
from dsv3_jax.server.frontend.remote_engine import RemoteEngine
from dsv3_jax.server.grammar import GrammarError
from tests.server.conftest import RunningServer, running
from tests.server.processes import ServerProcess

SECONDS = 30


class SharedHost(EngineHost):
    """A host whose engine serves other tests too, and is not shut down."""

    def call_shutdown(self) -> None:
        pass


def hang_up(connection: Connection) -> None:
    """Ends a connection, as the end of its process does."""
    with socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def connected(engine: Any, tokenizer: Any) -> Iterator[tuple[RemoteEngine, list[str]]]:
    """Yields an engine's counterpart at the other end of a pipe, and what it reported."""
    ours, theirs = multiprocessing.Pipe()
    host = threading.Thread(target=SharedHost(engine, tokenizer, theirs).serve)
    host.start()
    events: list[str] = []
    try:
        yield RemoteEngine(ours, on_loss=lambda: events.append("lost")), events
    finally:
        hang_up(ours)
        host.join(SECONDS)
        assert not host.is_alive()


@pytest.fixture(scope="module")
def remote(server) -> Iterator[RunningServer]:
    """A second server on the engine of ``server``, through a pipe."""
    with (
        connected(server.engine, server.tokenizer) as (engine, _),
        running(engine, server.tokenizer) as it,  # pyright: ignore[reportArgumentType]
    ):
        yield it


PROMPT = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 12}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**PROMPT, "temperature": 0}),
        ("/v1/completions", {**PROMPT, "n": 2, "seed": 3, "logprobs": 2}),
        ("/v1/completions", {**PROMPT, "prompt": ["a", "b"], "temperature": 0, "stop": "\n"}),
        ("/v1/completions", {**PROMPT, "seed": 1, "structured_outputs": {"regex": "[0-9]{3}"}}),
        ("/v1/chat/completions", {**CHAT, "seed": 5, "logprobs": True, "top_logprobs": 1}),
        ("/tokenize", {"model": "demo", "prompt": "def"}),
    ],
)
def test_answers_are_the_same(server, remote, path, body):
    answers = [each.post(path, body) for each in (server, remote)]
    for answer in answers:
        for name in ("id", "created"):
            answer.pop(name, None)
        if "usage" in answer:  # the second one finds the first one's pages
            answer["usage"].pop("prompt_tokens_details", None)
    assert answers[0] == answers[1]
    remote.wait_until_idle()


def test_streams_are_the_same(server, remote):
    body = {**PROMPT, "seed": 2, "stream": True, "logprobs": 1}
    streams = []
    for each in (server, remote):
        status, _, content = each.request("POST", "/v1/completions", body)
        assert status == 200
        events = [json.loads(line[6:]) for line in content.decode().split("\n\n")[:-2]]
        choices = [choice for event in events for choice in event["choices"]]
        joined = {"text": "", "tokens": [], "token_logprobs": []}
        for choice in choices:
            joined["text"] += choice["text"]
            for name in ("tokens", "token_logprobs"):
                joined[name] += choice["logprobs"][name]
        streams.append(joined)
    assert streams[0] == streams[1]
    assert streams[0]["text"]


def test_errors_are_the_same(server, remote):
    for body in (
        {**PROMPT, "prompt": "x" * 5000},
        {**PROMPT, "model": "gpt"},
        {**PROMPT, "temperature": -1},
        {**PROMPT, "n": 100},
        {**PROMPT, "structured_outputs": {"regex": "("}},
    ):
        assert remote.refused("/v1/completions", body) == server.refused("/v1/completions", body)
    remote.wait_until_idle()


def test_a_client_that_goes_away_cancels_its_request(remote):
    body = {**PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", remote.port, timeout=SECONDS)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    assert b"data" in connection.getresponse().readline()
    connection.close()
    remote.wait_until_idle()
    end = time.monotonic() + SECONDS
    while remote.engine._open and time.monotonic() < end:  # its end is on its way
        time.sleep(0.01)
    assert not remote.engine._open


def test_probes_and_figures(server, remote):
    assert remote.request("GET", "/health")[0] == 200
    assert remote.engine.step_seconds >= 0
    remote.wait_until_idle()
    assert remote.engine.stats().steps == server.engine.stats().steps > 0
    assert b"vllm:generation_tokens_total" in remote.request("GET", "/metrics")[2]


def _cause(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineError("e"), EngineError),
        (QueueFullError("q"), QueueFullError),
        (_cause(RequestError("request: g"), GrammarError("g")), RequestError),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "u"), ValueError),
        (OSError("o"), RuntimeError),
    ],
)
def test_errors_keep_their_kind_and_cause(error, kind):
    copy = pickle.loads(pickle.dumps(PortableError.of(error))).exception()
    assert (type(copy), str(copy)) == (kind, str(error))
    assert type(copy.__cause__) is type(error.__cause__)


class IdleEngine:
    """An engine whose requests gain tokens when the test delivers them."""

    def __init__(self):
        self.vocab_size, self.end_tokens = 300, (0,)
        self.failure: EngineError | None = None
        self.step_seconds = 0.0
        self.handles: list[EngineRequest] = []

    def submit_all(self, prompts: list[str], *, n: int, grammars: list[Any]) -> list[EngineRequest]:
        assert not grammars
        if "full" in prompts:
            raise QueueFullError("waiting queue: full")
        self.handles += [EngineRequest(lambda _: None) for _ in range(n * len(prompts))]
        self.handles[-1].prompt_record = PromptRecord(3, 1)
        return self.handles[-n * len(prompts) :]


@pytest.fixture
def idle(server) -> Iterator[tuple[IdleEngine, RemoteEngine, list[str]]]:
    engine = IdleEngine()
    with connected(engine, server.tokenizer) as (remote, events):
        yield engine, remote, events


def test_pieces_of_several_steps_arrive_in_order(idle):
    engine, remote, _ = idle
    first, second = remote.submit_all(["a"], n=2)
    engine.handles[1].deliver("x", [1], [-1.0], None)
    for i in range(200):
        engine.handles[0].accepted_drafts.append(i)
        engine.handles[0].deliver(f"{i},", [i], [-float(i)], [[(i, -1.0)]])
        end = time.monotonic() + SECONDS
        while i < 2 and len(first.pieces_from(0)) <= i and time.monotonic() < end:
            time.sleep(0.001)  # the first two arrive in messages of their own
    completion = Completion("whole", [7], [-1.0], "length", 1)
    engine.handles[0].deliver("end", [], [], None, completion)
    engine.handles[1].fail(RequestError("request: broken"))
    assert first.result(SECONDS) == completion
    pieces = list(first)
    assert "".join(piece.text for piece in pieces) == "".join(f"{i}," for i in range(200)) + "end"
    assert [token for piece in pieces for token in piece.tokens] == list(range(200))
    assert [top for piece in pieces for top in piece.top_logprobs] == [
        [(i, -1.0)] for i in range(200)
    ]
    assert first.accepted_drafts == list(range(200))
    with pytest.raises(RequestError, match="broken"):
        second.result(SECONDS)
    assert first.prompt_record is None
    assert second.prompt_record is not None
    assert second.prompt_record.logprobs == [None] * 3
    assert [piece.text for piece in second.pieces_from(0)] == ["x"]
    assert not remote._open


def test_the_server_has_tokens_delivered_in_its_loop(remote):
    assert remote.engine._loop is remote.loop


def test_a_message_calls_the_loop_once():
    """Its readers are woken up in its own thread, and an end comes after what came before it."""
    ours, theirs = multiprocessing.Pipe()
    theirs.send(Hello(300, (0,)))
    remote = RemoteEngine(ours, on_loss=lambda: None)
    submitted: queue.Queue[Sequence[int]] = queue.Queue()

    def accept() -> None:
        call = theirs.recv()
        submitted.put(call.arguments[0])
        theirs.send(Reply(call.number, None, None))

    async def read() -> tuple[list[str], int]:
        loop, calls = asyncio.get_running_loop(), 0
        call_soon = loop.call_soon_threadsafe

        def counted(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return call_soon(*arguments)

        async def text(handle: EngineRequest) -> str:
            pieces = aiter(handle)
            piece = await anext(pieces)
            with pytest.raises(EngineError, match="its process has ended"):
                await anext(pieces)
            return piece.text

        threading.Thread(target=accept).start()
        readers = [asyncio.create_task(text(each)) for each in remote.submit_all(["a"], n=20)]
        await asyncio.sleep(0)  # they wait for their first piece
        loop.call_soon_threadsafe = counted  # pyright: ignore[reportAttributeAccessIssue]
        remote.deliver_in(loop)
        ids = submitted.get(timeout=SECONDS)
        gains = [Gain(i, "x", [7], [-1.0], None, [], None, None, None) for i in ids]
        theirs.send(Gains(gains))
        theirs.close()
        return await asyncio.gather(*readers), calls

    texts, calls = asyncio.run(read())
    assert texts == ["x"] * 20
    assert calls == 2  # the message, and the end of the process
    assert not remote._open


def test_what_a_closed_loop_does_not_take_arrives(idle):
    engine, remote, _ = idle
    loop = asyncio.new_event_loop()
    loop.close()
    remote.deliver_in(loop)
    (handle,) = remote.submit_all(["a"])
    engine.handles[0].deliver("b", [1], [0.0], None)
    engine.handles[0].fail(RequestError("request: broken"))
    with pytest.raises(RequestError, match="broken"):
        handle.result(SECONDS)
    assert [piece.text for piece in handle.pieces_from(0)] == ["b"]


def test_first_tokens_have_a_message_of_their_own():
    """They are sent before the tokens of streams that have begun, whichever came first."""
    messages: queue.Queue[Gains] = queue.Queue()
    outbox = _Outbox(messages.put)
    begun, new = (EngineRequest(lambda _: None) for _ in range(2))
    begun.deliver("a", [1], [0.0], None)
    outbox._open = {number: _OpenRequest(number, r) for number, r in enumerate((begun, new))}
    assert outbox._open[0].gain() is not None
    for number, request in enumerate((begun, new)):
        request.deliver("b", [2], [0.0], None)
        outbox._mark(number)
    thread = threading.Thread(target=outbox.run)
    thread.start()
    try:
        sent = [[gain.id for gain in messages.get(timeout=30).gains] for _ in range(2)]
    finally:
        outbox.close()
        thread.join()
    assert sent == [[1], [0]]


def test_short_calls_do_not_wait_for_submissions(idle):
    """Encoding takes long: a request can be cancelled meanwhile, and figures be read."""
    engine, remote, _ = idle
    may_end, cancelled = threading.Event(), threading.Event()
    handle = EngineRequest(lambda _: cancelled.set())
    engine.submit_all = lambda *_, **__: [handle]
    (request,) = remote.submit_all(["x"])
    engine.submit_all = lambda *_, **__: may_end.wait(SECONDS) and [EngineRequest(lambda _: None)]
    engine.stats = lambda: "figures"
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            threads.submit(remote.submit_all, ["long"])
        try:
            request.cancel()
            assert cancelled.wait(SECONDS)
            assert remote.stats() == "figures"
        finally:
            may_end.set()


@pytest.mark.parametrize("where", ["gain", "send"])
def test_an_error_of_one_message_ends_its_requests_alone(where):
    """The thread that sends goes on: else all streams would stop without an end."""
    messages: queue.Queue[Gains] = queue.Queue()
    cancelled: list[EngineRequest] = []
    broken, other = EngineRequest(cancelled.append), EngineRequest(cancelled.append)

    def send(gains: Gains) -> None:
        if any(gain.text == "x" for gain in gains.gains):
            raise MemoryError
        messages.put(gains)

    outbox = _Outbox(send)
    outbox._open = {number: _OpenRequest(number, r) for number, r in enumerate((broken, other))}
    if where == "gain":

        def gain() -> Gain:
            raise RecursionError("too deep")

        outbox._open[0].gain = gain  # pyright: ignore[reportAttributeAccessIssue]
    other.deliver("a", [1], [0.0], None)
    assert outbox._open[1].gain() is not None  # so that each has a message of its own
    thread = threading.Thread(target=outbox.run)
    thread.start()
    try:
        broken.deliver("x", [1], [0.0], None)
        outbox._mark(0)
        (failed,) = messages.get(timeout=SECONDS).gains
        other.deliver("b", [2], [0.0], None)
        outbox._mark(1)
        (sent,) = messages.get(timeout=SECONDS).gains
    finally:
        outbox.close()
        thread.join()
    assert failed.id == 0
    assert failed.error is not None
    assert cancelled[0] is broken
    assert (sent.id, sent.text, sent.error) == (1, "b", None)


def test_a_reply_that_cannot_be_sent_is_an_error_of_the_call(idle, monkeypatch):
    _, remote, _ = idle
    monkeypatch.setattr(EngineHost, "call_stats", lambda self: threading.Lock())
    with pytest.raises(RuntimeError, match="pickle"):
        remote.stats()


def test_a_message_that_cannot_be_read_ends_all_that_wait(idle, monkeypatch):
    _, remote, events = idle
    (handle,) = remote.submit_all(["a"])
    monkeypatch.setattr(remote._silence, "interrupt", lambda: 1 / 0)  # at the next sign of life
    with pytest.raises(EngineError, match="its process has ended"):
        handle.result(SECONDS)
    assert events == ["lost"]


def test_a_refused_submission_leaves_nothing(idle):
    _, remote, _ = idle
    with pytest.raises(QueueFullError, match="waiting queue: full"):
        remote.submit_all(["full"])
    assert not remote._open
    assert not remote._replies


def test_logits_that_are_not_finite_are_an_error_of_the_request():
    generation: Any = None
    error = PortableError.of(NonFiniteLogitsError("request: NaN", generation)).exception()
    assert isinstance(error, RequestError)


def test_what_came_before_an_error_is_sent_with_it():
    class Handle(EngineRequest):
        """One that gains a piece and fails as soon as somebody has looked for pieces or errors."""

        def pieces_from(self, position: int):
            try:
                return super().pieces_from(position)
            finally:
                if not self.is_done:
                    self.deliver("last", [1], [0.0], None)
                    self.fail(RequestError("request: its grammar"))

    request = _OpenRequest(0, Handle(lambda _: None))
    gains = [gain for _ in range(2) if (gain := request.gain()) is not None]
    assert [(gain.text, gain.error is None) for gain in gains] == [("last", False)]


def test_a_reply_that_two_threads_end_stops_neither(idle):
    """The thread that reads goes on to end the requests and the process."""
    _, remote, _ = idle

    class Racing(concurrent.futures.Future):
        """It looks open until another thread has ended it."""

        def done(self) -> bool:
            return False

    reply = Racing()
    reply.set_exception(EngineError("by the caller"))
    remote._replies[-1] = reply
    (handle,) = remote.submit_all(["a"])
    remote._fail_all(EngineError("engine: its process has ended"))
    with pytest.raises(EngineError, match="its process has ended"):
        handle.result(SECONDS)


def test_a_failure_of_the_engine_is_reported(idle):
    engine, remote, events = idle
    assert remote.failure is None
    engine.failure = EngineError("engine: a step failed: NaN")
    end = time.monotonic() + SECONDS
    while remote.failure is None and time.monotonic() < end:
        time.sleep(0.01)
    assert str(remote.failure) == "engine: a step failed: NaN"
    assert remote.step_seconds == 0.0
    assert not events


def test_the_end_of_the_engines_process_ends_everything(server):
    engine: Any = IdleEngine()
    ours, theirs = multiprocessing.Pipe()
    host = threading.Thread(target=EngineHost(engine, server.tokenizer, theirs).serve)
    host.start()
    lost = threading.Event()
    remote = RemoteEngine(ours, on_loss=lost.set)
    (handle,) = remote.submit_all(["a"])
    hang_up(theirs)
    with pytest.raises(EngineError, match="its process has ended"):
        handle.result(SECONDS)
    assert lost.wait(SECONDS)
    with pytest.raises(EngineError, match="its process has ended"):
        remote.stats()
    host.join(SECONDS)


def test_tokenizers_can_be_sent(server):
    tokenizer = server.tokenizer
    copy = pickle.loads(pickle.dumps(tokenizer))
    text = "def f(): <｜User｜> <think>"
    for split in (True, False):
        assert copy.encode(text, split_special_tokens=split) == tokenizer.encode(
            text, split_special_tokens=split
        )
    messages = [{"role": "user", "content": text}]
    assert copy.chat(messages) == tokenizer.chat(messages)
    assert copy.to_json() == tokenizer.to_json()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"  # one that nobody waited for has ended, too


def _is_refused(server: RunningServer) -> bool:
    """Returns whether connections are refused, after the moment in which a socket closes."""
    for _ in range(100):
        with contextlib.suppress(ConnectionResetError):
            try:
                server.request("GET", "/health")
            except ConnectionRefusedError:
                return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.isdir("/proc/self/task"), reason="needs Linux, to find processes in /proc"
)
@pytest.mark.parametrize("killed", ["engine", "http"])
def test_the_death_of_one_process_ends_the_other(killed):
    with ServerProcess(runner="run_with_http_process") as process:
        server = process.ready()
        assert server.post("/v1/completions", PROMPT)["choices"]
        engine = process.process.pid
        pids = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
        (child,) = [
            int(pid)
            for pid in pids
            if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(engine if killed == "engine" else child, signal.SIGKILL)
        assert process.process.wait(SECONDS) == (-signal.SIGKILL if killed == "engine" else 1)
        end = time.monotonic() + SECONDS
        while _is_alive(child) and time.monotonic() < end:
            time.sleep(0.05)
        assert not _is_alive(child)
        assert _is_refused(server)
