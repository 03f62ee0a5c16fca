"""The watchdog: a stuck device or a failed engine ends the server."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import re
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dsv3_jax.engine import Engine, EngineError
from dsv3_jax.server.watchdog import Watchdog
from tests.engine.simulated_engine import SimulatedEngine
from tests.server.processes import ServerProcess
from tests.server.test_metrics import figures


def service(engine: Any, stuck_seconds: float) -> Any:
    """Returns the part of a service that the watchdog uses."""

    class Service(SimpleNamespace):
        @property
        def failure(self) -> EngineError | None:
            return self.engine.failure

    return Service(engine=engine, settings=SimpleNamespace(stuck_seconds=stuck_seconds))


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "hangs"])
def test_a_stuck_device(ends, caplog):
    released, ended, exited = threading.Event(), threading.Event(), threading.Event()
    engine = SimulatedEngine(
        num_pages=24, background=True, latency=lambda: float(not released.wait(30))
    )
    caplog.set_level(logging.ERROR, "dsv3_jax.server")
    with Watchdog(service(engine.loop, 0.2), ended.set, exited.set, 0.1 if not ends else 30):
        assert not ended.wait(0.4)  # an idle engine is not stuck
        began = time.monotonic()
        handle = engine.submit([1, 2, 3], 5).handle
        assert ended.wait(30)
        assert 0.2 <= time.monotonic() - began < 5
        with pytest.raises(EngineError, match="its device is stuck"):
            handle.result(30)
        assert exited.wait(0.05 if ends else 30) is not ends
    (line,) = [r.getMessage() for r in caplog.records if r.name == "dsv3_jax.server.watchdog"]
    assert line == "the server ends: engine: a step has taken more than 0.2 s; its device is stuck"
    released.set()
    engine.loop.shutdown()


def test_the_watchdog_survives_an_error(caplog):
    ended = threading.Event()
    engine = SimpleNamespace(failure=None)

    def fail_if_stuck(limit: float) -> None:
        if engine.failure is None:
            engine.failure = EngineError("stuck")
            raise MemoryError

    engine.fail_if_stuck = fail_if_stuck
    caplog.set_level(logging.ERROR, "dsv3_jax.server")
    with Watchdog(service(engine, 0.01), ended.set, lambda: None, 30):
        assert ended.wait(30)
    assert caplog.records[0].exc_info[0] is MemoryError


class Hours(SimpleNamespace):
    """The clock of an engine, which the test puts forward."""

    def __init__(self):
        super().__init__(sleep=time.sleep, perf_counter=time.perf_counter)
        self.passed = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.passed


@pytest.fixture
def hours(monkeypatch) -> Hours:
    clock = Hours()
    for module in ("loop", "stats"):
        monkeypatch.setattr(f"dsv3_jax.engine.{module}.time", clock)
    return clock


def test_a_compilation_is_no_stuck_device(hours):
    """A step may wait for a program for longer than for the device. Before and after it, and with
    it, the time of the device counts."""
    compiling, compiled, released = threading.Event(), threading.Event(), threading.Event()
    engine = SimulatedEngine(num_pages=24)
    loop = engine.loop

    def wait(self=engine.executor, original=engine.executor.wait):
        with loop._compilations.measure("decodes=4"):
            compiling.set()
            assert compiled.wait(30)
        assert released.wait(30)
        return original()

    engine.executor.wait = wait
    loop.start()
    handle = engine.submit([1, 2, 3], 1).handle
    assert compiling.wait(30)
    hours.passed = 1700
    assert loop.step_seconds < 60
    loop.fail_if_stuck(100)
    assert loop.failure is None
    stats = loop.stats()
    assert 1700 <= stats.compiling_seconds == pytest.approx(stats.compile_seconds, abs=60)
    compilation = loop._compilations.current
    assert compilation is not None
    assert compilation.program == "decodes=4"
    compiled.set()
    while loop._compilations.current is not None:
        time.sleep(0.001)
    assert loop.stats().compiling_seconds == 0
    hours.passed += 60
    loop.fail_if_stuck(130)
    assert loop.failure is None
    hours.passed += 100
    assert 160 <= loop.step_seconds < 220
    loop.fail_if_stuck(130)
    with pytest.raises(EngineError, match=r"more than 130 s; its device is stuck"):
        handle.result(30)
    released.set()
    loop.shutdown()


def test_a_compiler_that_is_stuck(hours):
    engine = SimulatedEngine(num_pages=24)
    handle = engine.submit([1, 2, 3], 5).handle
    engine.loop._compilations.begin("one", "decodes=4")
    engine.loop._compilations.begin("other", "decodes=8")
    engine.loop._compilations.end("nobody")
    hours.passed = 1790
    engine.loop.fail_if_stuck(100)
    assert engine.loop.failure is None
    hours.passed = 1900
    engine.loop.fail_if_stuck(2000)
    assert engine.loop.failure is None
    engine.loop.fail_if_stuck(100)
    message = (
        "the compilation of a step (decodes=4) has taken more than 1800 s; the compiler is stuck"
    )
    with pytest.raises(EngineError, match=re.escape(message)):
        handle.result(30)


def test_a_compilation_for_other_options(server, hours, monkeypatch, caplog):
    """Probes and figures report it, a client that goes away meanwhile is forgotten, and all other
    requests go on after it."""
    engine, entered, released = server.engine, threading.Event(), threading.Event()
    server.wait_until_idle()
    programs = engine._programs
    known, launches = dict(programs._compiled), []

    def compile_slowly(lowered: None, shape: Any) -> Any:
        assert [each for _, each in launches][-1] == shape, "followers are told before it"
        entered.set()
        assert released.wait(30)
        return known[shape]

    monkeypatch.setattr(programs, "on_launch", lambda *step: launches.append(step))
    monkeypatch.setattr(programs, "_compiled", {})
    monkeypatch.setattr(programs, "_lower", lambda state, shape: None)
    monkeypatch.setattr(programs, "compile", compile_slowly)
    changes: list[Any] = []
    monkeypatch.setattr(engine.compilations, "on_change", changes.append)
    caplog.set_level(logging.WARNING, "dsv3_jax.engine.device.programs")
    before = figures(server)
    body = {"model": "demo", "prompt": "x", "max_tokens": 1}
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        answer = threads.submit(server.post, "/v1/completions", body)
        assert entered.wait(30)
        hours.passed = 1000
        engine.fail_if_stuck(300)
        for path in ("/health", "/ready"):
            assert server.request("GET", path)[0] == 200
        during = figures(server)
        assert 1000 <= during["dsv3:compiling_seconds"] < 1100
        leaving = engine.submit("y", max_new_tokens=5)
        leaving.cancel()
        released.set()
        assert answer.result(30)["usage"]["completion_tokens"] == 1
        assert leaving.result(30).finish_reason == "cancelled"
    server.wait_until_idle()
    after = figures(server)
    assert after["dsv3:compiling_seconds"] == 0
    count = after["dsv3:compiled_programs_total"] - before["dsv3:compiled_programs_total"]
    assert count == len(programs._compiled) >= 1
    assert after["dsv3:compile_seconds_total"] - before["dsv3:compile_seconds_total"] >= 1000
    lines = [r.getMessage() for r in caplog.records if r.name == "dsv3_jax.engine.device.programs"]
    assert len(lines) == 2 * count
    shape = next(iter(programs._compiled))
    assert lines[0] == f"compiling a step after warm-up, while all requests wait: {shape}"
    assert re.fullmatch(r"compiled a step after warm-up in \d+\.\d s: .*", lines[1])
    assert lines[1].endswith(f": {shape}")
    assert [change and change.program for change in changes[:2]] == [shape.name, None]


def test_health_of_a_slow_step(server, monkeypatch):
    for seconds, expected in ((149, 200), (151, 503)):
        monkeypatch.setattr(Engine, "step_seconds", property(lambda engine, s=seconds: float(s)))
        for path in ("/health", "/ready"):
            status, _, body = server.request("GET", path)
            assert status == expected
    assert "a step has taken 151.0 s so far" in json.loads(body)["error"]["message"]


@pytest.mark.slow
def test_the_process_ends():
    message = "a step has taken more than 1 s; its device is stuck"
    stuck = "Executor.wait = lambda self: time.sleep(1000)"
    with ServerProcess(change=stuck, stuck_seconds=1.0) as process:
        body = {"model": "demo", "prompt": "x", "max_tokens": 20}
        status, error = process.ready().refused("/v1/completions", body)
        assert status == 500
        assert message in error["message"]
        assert process.wait() == 1
        assert [message in line for line in process.lines if "server ends" in line] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["run", "run_with_http_process"])
def test_the_process_does_not_end_with_a_compilation_but_by_a_signal(runner):
    """A program that is compiled for longer than a step may take is no failure, and SIGTERM ends
    the server meanwhile."""
    # After warm-up nothing is compiled any more, as if all requests had other options.
    change = """
warm_up, programs = engine.warm_up, engine._programs
def warm_up_and_forget(directory):
    seconds = warm_up(directory)
    programs._compiled.clear()
    programs.compile = lambda *_: time.sleep(1000)
    return seconds
engine.warm_up = warm_up_and_forget
"""
    limits: dict[str, Any] = {"stuck_seconds": 0.5, "drain_seconds": 0.1}
    with ServerProcess(change=change, runner=runner, **limits) as process:
        server = process.ready()
        body = {"model": "demo", "prompt": "x", "max_tokens": 2}
        request = threading.Thread(
            target=lambda: server.request("POST", "/v1/completions", body), daemon=True
        )
        request.start()
        process.wait_for("compiling a step after warm-up")
        time.sleep(2)
        assert server.request("GET", "/health")[0] == 200
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        assert not [line for line in process.lines if "stuck" in line]
