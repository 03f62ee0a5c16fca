"""An engine's process that is frozen: it is noticed, and the requests end."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest

from dsv3_jax.engine import EngineError
from dsv3_jax.engine.stats import CompileTimes
from dsv3_jax.server.frontend import remote_engine
from dsv3_jax.server.frontend.host import EngineHost
from dsv3_jax.server.frontend.messages import Alive, Call, Compiling, Hello, Reply
from dsv3_jax.server.frontend.remote_engine import RemoteEngine, Silence
from tests.server.processes import ServerProcess
from tests.server.test_frontend import IdleEngine, connected, hang_up

SECONDS = 30


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class FrozenProcess:
    """The other end of a connection, at which nobody does anything unless the test does."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.lost: list[str] = []

    def receive_all(self) -> None:
        """Receives until the other side ends the connection."""
        while True:
            self.connection.recv()

    def answer(self) -> Call:
        """Answers the next call."""
        call = self.connection.recv()
        self.connection.send(Reply(call.number, None, None))
        return call


@contextlib.contextmanager
def hanging_up(remote: RemoteEngine) -> Iterator[None]:
    """Ends the connection after the body, so that no thread waits for it if the body fails."""
    try:
        yield
    finally:
        hang_up(remote._connection)


@pytest.fixture
def frozen() -> Iterator[tuple[RemoteEngine, FrozenProcess]]:
    ours, theirs = multiprocessing.Pipe()
    process = FrozenProcess(theirs)
    theirs.send(Hello(300, (0,)))
    remote = RemoteEngine(ours, on_loss=lambda: process.lost.append("lost"))
    remote._silence.end()  # the test looks instead
    with hanging_up(remote):
        yield remote, process


def pass_time(remote: RemoteEngine, seconds: float) -> None:
    """Lets looks take place, and one more, since the first may see an earlier message."""
    for _ in range(1 + round(seconds / remote_engine.LOOK_SECONDS)):
        remote._silence.look()


def test_short_silences_do_not_count():
    it = Silence()
    it.end()
    for _ in range(19):
        it.look()
    assert it.seconds == 0
    it.look()
    assert it.seconds == 10
    it.interrupt()
    assert it.seconds == 0, "at once, not with the next look"
    it.look()
    assert it.seconds == 0


def test_its_thread_looks(monkeypatch):
    monkeypatch.setattr(remote_engine, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(remote_engine, "_LEAST_SECONDS", 0.05)
    it = Silence()
    wait_until(lambda: it.seconds)
    it.end()
    it._thread.join(SECONDS)
    assert not it._thread.is_alive()


def test_all_that_waits_ends_with_an_error(frozen):
    remote, process = frozen
    with ThreadPoolExecutor(3) as threads, hanging_up(remote):
        submitted = threads.submit(remote.submit_all, ["a"])
        process.answer()
        (handle,) = submitted.result(SECONDS)
        question = threads.submit(remote.stats)
        blocked = threads.submit(remote.submit_all, ["x" * 2**24])  # more than the pipe takes
        wait_until(lambda: len(remote._replies) == 2)
        pass_time(remote, 20)
        remote.fail_if_stuck(25)
        assert remote.failure is None
        assert 20 <= remote.silent_seconds < 25
        pass_time(remote, 10)
        remote.fail_if_stuck(25)  # it returns, although the pipe is full
        for error in (question.exception(SECONDS), blocked.exception(SECONDS), remote.failure):
            assert isinstance(error, EngineError)
            assert "engine: its process has given no sign of life for 3" in str(error)
            assert "\n" not in str(error)
        with pytest.raises(EngineError, match="no sign of life"):
            handle.result(SECONDS)
        with pytest.raises(EngineError, match="no sign of life"):
            threads.submit(remote.stats).result(SECONDS)
    assert not remote._open
    with pytest.raises((EOFError, OSError)):  # it ends if it is resumed
        process.receive_all()
    assert remote.is_given_up
    assert not process.lost, "clients receive their errors before the process ends"


def test_a_sign_of_life_ends_the_silence(frozen):
    remote, process = frozen
    pass_time(remote, 30)
    assert remote.silent_seconds >= 30
    process.connection.send(Alive(3.5))
    wait_until(lambda: remote.step_seconds == 3.5)
    assert remote.silent_seconds == 0
    remote.fail_if_stuck(1)
    assert remote.failure is None
    assert process.connection.recv().method == "fail_if_stuck"


def test_compiling_may_be_silent(frozen):
    remote, process = frozen
    with ThreadPoolExecutor(1) as threads, hanging_up(remote):
        warm_up = threads.submit(remote.warm_up)
        wait_until(lambda: remote._replies)
        pass_time(remote, 1000)
        assert remote.silent_seconds == 0
        remote.fail_if_stuck(300)
        assert remote.failure is None
        assert process.answer().method == "warm_up"
        warm_up.result(SECONDS)
        assert remote.silent_seconds == 0
        pass_time(remote, 20)
        assert remote.silent_seconds >= 20


def test_compiling_for_a_step_may_be_silent(frozen):
    """Also later than in warm-up, and not for ever."""
    remote, process = frozen
    process.connection.send(Compiling("decodes=4"))
    wait_until(lambda: remote._compiling)
    pass_time(remote, 1700)
    assert remote.silent_seconds == 0
    remote.fail_if_stuck(300)
    assert remote.failure is None
    process.connection.send(Compiling(None))
    wait_until(lambda: not remote._compiling)
    pass_time(remote, 20)
    assert remote.silent_seconds >= 20
    process.connection.send(Compiling("decodes=8"))
    wait_until(lambda: remote._compiling)
    pass_time(remote, 1900)
    assert remote.silent_seconds == 0
    remote.fail_if_stuck(300)
    assert "its process has given no sign of life for 19" in str(remote.failure)
    assert remote.is_given_up


def test_the_engines_process_reports_compilations(server):
    ours, theirs = multiprocessing.Pipe()
    host = EngineHost(IdleEngine(), server.tokenizer, theirs)  # pyright: ignore[reportArgumentType]
    compilations = CompileTimes()
    compilations.on_change = host.report
    with compilations.measure("decodes=4"):
        assert ours.recv() == Compiling("decodes=4")
    assert ours.recv() == Compiling(None)


def test_the_engines_process_gives_signs_of_life(server):
    engine: Any = IdleEngine()
    with connected(engine, server.tokenizer) as (remote, _):
        engine.step_seconds = 2.5
        wait_until(lambda: remote.step_seconds == 2.5)
        engine.step_seconds = 0.0
        wait_until(lambda: remote.step_seconds == 0)


def test_health(frozen, server, monkeypatch):
    remote, _ = frozen
    monkeypatch.setattr(server.service, "engine", remote)
    pass_time(remote, 149)
    assert server.request("GET", "/health")[0] == 200
    pass_time(remote, 2)
    for path in ("/health", "/ready"):
        status, _, body = server.request("GET", path)
        assert status == 503
        message = json.loads(body)["error"]["message"]
        assert message == "engine: its process has given no sign of life for 152 s"


@pytest.mark.slow
def test_a_frozen_process_is_ended():
    """Waiting requests get an error first, and a supervisor sees that the process is dead."""
    with ServerProcess(runner="run_with_http_process", stuck_seconds=1.0) as process:
        server = process.ready()
        os.kill(process.process.pid, signal.SIGSTOP)
        answers: list[tuple[int, dict[str, Any]]] = []
        body = {"model": "demo", "prompt": "x", "max_tokens": 20}
        threads = [
            threading.Thread(
                target=lambda more=more: answers.append(
                    server.refused("/v1/completions", {**body, **more})
                )
            )
            for more in ({}, {"stream": True})
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SECONDS)
        assert [status for status, _ in answers] == [500, 500]
        for _, error in answers:
            assert error["message"].startswith("engine: its process has given no sign of life for")
            assert error["code"] == "engine_error"
        assert process.wait() == -signal.SIGKILL
        assert [line for line in process.lines if "server ends: engine: its process" in line]
