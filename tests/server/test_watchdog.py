"""The watchdog: a stuck device or a failed engine ends the server."""

from __future__ import annotations

import json
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dsv3_jax.engine import Engine, EngineError
from dsv3_jax.server.watchdog import Watchdog
from tests.engine.simulated_engine import SimulatedEngine
from tests.server.processes import ServerProcess


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
