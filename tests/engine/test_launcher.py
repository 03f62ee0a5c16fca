"""Launches run in order in a thread of their own; failures and interrupts end the engine."""

from __future__ import annotations

import concurrent.futures
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from dsv3_jax.engine import Engine, EngineError
from dsv3_jax.engine.device.executor import Launcher
from dsv3_jax.engine.device.programs import Programs
from dsv3_jax.engine.stats import DispatchTimes
from tests.engine.conftest import BUCKETS, MAX_LEN

PROMPT = [5, 6, 7]
SETTINGS = {"max_new_tokens": 12, "ignore_eos": True}


def make(model, **options) -> Engine:
    return Engine(model, None, MAX_LEN, max_running=4, buckets=BUCKETS, **options)


def append(number: int) -> Callable:
    """A launch that adds a number to the state, a list."""
    return lambda state: ([*state, number], number)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("background", [False, True])
class TestLauncher:
    def test_in_order(self, background):
        launcher = Launcher([], background=background)  # pyright: ignore
        futures = [launcher.launch(append(i)) for i in range(50)]
        assert [future.result() for future in futures] == list(range(50))
        assert launcher.state == list(range(50))
        launcher.close()

    def test_a_launch_is_freed(self, background):
        """Its function refers to a plan, and that to requests."""
        launcher = Launcher([], background=background)  # pyright: ignore
        launched = append(0)
        watched = weakref.ref(launched)
        launcher.launch(launched).result()
        del launched
        wait_until(lambda: watched() is None)
        launcher.close()

    def test_nothing_runs_after_an_error(self, background):
        launcher = Launcher([], background=background)  # pyright: ignore
        launcher.launch(append(0))
        failed = launcher.launch(lambda state: 1 // 0)
        later = launcher.launch(append(1))
        with pytest.raises(ZeroDivisionError):
            failed.result()
        with pytest.raises(EngineError, match="an earlier one failed"):
            later.result()
        assert launcher.state == [0]
        launcher.close()


def test_errors_of_any_kind_end_later_launches():
    """The thread goes on, so that nobody waits for it for ever."""
    launcher = Launcher([], background=True)  # pyright: ignore

    def end(state):
        raise SystemExit

    failed = launcher.launch(end)
    with pytest.raises(SystemExit):
        failed.result(30)
    with pytest.raises(EngineError, match="an earlier one failed"):
        launcher.launch(append(1)).result(30)
    launcher.close()


def test_a_launch_returns_while_the_one_before_blocks():
    launcher = Launcher([], background=True)  # pyright: ignore
    go = threading.Event()
    first = launcher.launch(lambda state: ([*state, go.wait(30)], None))
    second = launcher.launch(append(2))
    assert not first.done()
    assert not second.done()
    go.set()
    assert second.result(30) == 2
    assert launcher.state == [True, 2]
    launcher.close()


def test_closing_ends_what_has_not_begun():
    launcher = Launcher([], background=True)  # pyright: ignore
    began, go = threading.Event(), threading.Event()

    def block(state):
        began.set()
        return [*state, go.wait(30)], None

    launcher.launch(block)
    later = launcher.launch(append(2))
    assert began.wait(30)
    closing = threading.Thread(target=launcher.close)
    closing.start()
    while not launcher._is_closed:
        time.sleep(0.001)
    go.set()
    closing.join(30)
    # It does not see a future that was only cancelled.
    assert concurrent.futures.wait([later], 30).done == {later}
    with pytest.raises(EngineError, match="shutdown"):
        later.result()
    with pytest.raises(EngineError, match="shutdown"):
        launcher.launch(append(3))


class LateQueue:
    """A launcher's queue in which a launch arrives after another thread had time to close it."""

    def __init__(self, launcher: Launcher):
        self.queue, self.closing = launcher._queue, threading.Thread(target=launcher.close)

    def put(self, launch):
        if launch is not None:
            self.closing.start()
            self.closing.join(0.5)
        self.queue.put(launch)

    def get(self):
        return self.queue.get()


def test_no_launch_is_behind_the_end_of_the_queue():
    """It would wait for ever."""
    launcher = Launcher([], background=True)  # pyright: ignore
    launcher._queue = queue = LateQueue(launcher)  # pyright: ignore
    future = launcher.launch(append(1))
    assert concurrent.futures.wait([future], 5).done
    queue.closing.join(30)


@pytest.fixture
def programs(monkeypatch):
    """Replaces what the n-th launch of a program does first."""
    actions: dict[int, Callable[[], object]] = {}
    count = 0
    run = Programs.__call__

    def call(self, *args):
        nonlocal count
        count += 1
        actions.get(count, lambda: None)()
        return run(self, *args)

    monkeypatch.setattr(Programs, "__call__", call)
    return actions


def test_results_are_read_while_a_launch_blocks(tiny_mtp, alone, programs):
    blocked, go = threading.Event(), threading.Event()
    programs[2] = lambda: (blocked.set(), go.wait(60))
    before = set(threading.enumerate())
    with make(tiny_mtp) as engine:
        request = engine.submit(PROMPT, **SETTINGS)
        first = next(iter(request))
        assert blocked.wait(60)
        assert not go.is_set()
        go.set()
        (wanted,) = alone.generate([PROMPT], **SETTINGS)
        assert request.result(60).tokens == wanted.tokens
        assert first.tokens == wanted.tokens[:1]
        stats = engine.stats()
    # The shutdown ended both threads. Other engines of this process may have theirs.
    names = [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive()]
    assert not [name for name in names if name.startswith("dsv3-")]
    assert stats.dispatches.launch_seconds > 0
    shapes = stats.dispatches.shapes
    assert sum(times.count for times in shapes.values()) == stats.steps
    assert {name.split()[0] for name in shapes} == {"decodes=4"}
    assert all("sampling=greedy" in name for name in shapes)


def test_a_failing_launch_ends_the_engine(tiny_mtp, programs):
    programs[2] = lambda: 1 // 0
    engine = make(tiny_mtp)
    request = engine.submit(PROMPT, **SETTINGS)
    with pytest.raises(EngineError, match="a step failed: integer division"):
        request.result(60)
    with pytest.raises(EngineError, match="a step failed"):
        engine.submit(PROMPT)
    engine.shutdown()


def test_an_interrupt_ends_an_engine_without_a_thread(tiny_mtp, programs):
    def interrupt() -> None:
        raise KeyboardInterrupt

    programs[2] = interrupt
    engine = make(tiny_mtp, background=False)
    request = engine.submit(PROMPT, **SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        engine.shutdown()  # runs steps until the request is done
    with pytest.raises(EngineError, match="a step failed: KeyboardInterrupt"):
        request.result(0)
    with pytest.raises(EngineError):
        engine.step()
    engine.shutdown()


def test_counting_keeps_nobody_from_the_engine(tiny_mtp, monkeypatch):
    """A thread that waits for the device has no lock: others notice when the device is stuck."""
    counts, asked = concurrent.futures.Future(), threading.Event()

    def take() -> concurrent.futures.Future:
        asked.set()
        return counts

    engine = make(tiny_mtp, count_routing=True)
    monkeypatch.setattr(engine._executor, "take_routing_counts", take)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        taken = pool.submit(engine.take_routing_counts)
        try:
            assert asked.wait(30)
            assert pool.submit(engine.stats).result(5).running == 0
        finally:
            counts.set_result(np.ones((1, 8), np.int32))
        assert taken.result(30).dtype == np.int64
    engine.shutdown()


def test_without_overlap_a_step_is_read_at_once(tiny_mtp, programs):
    with make(tiny_mtp, overlap=False) as engine:
        flights: list[int] = []
        for i in range(1, 9):
            programs[i] = lambda: flights.append(engine._executor.dispatches_in_flight)
        engine.submit(PROMPT, **SETTINGS).result(60)
    assert flights
    assert set(flights) == {0}


class TestDispatchTimes:
    def test_sums_up(self, monkeypatch):
        now = 0.0
        monkeypatch.setattr("dsv3_jax.engine.stats.time.perf_counter", lambda: now)
        times = DispatchTimes()

        def at(moment: float, event: Callable[[], object]) -> None:
            nonlocal now
            now = moment
            event()

        at(1.0, times.begin_launch)
        at(1.5, lambda: times.end_launch(1.0))
        at(2.0, times.begin_launch)  # in flight with the first
        at(4.0, lambda: times.finished("a"))
        before = times.figures
        at(5.0, lambda: times.finished("b"))
        at(7.0, times.begin_launch)  # two seconds after the last one ended
        at(8.0, lambda: times.finished("a"))
        at(8.5, times.rest)
        at(20.0, times.begin_launch)
        at(21.0, lambda: times.finished("a"))
        figures = times.figures
        assert figures.launch_seconds == 0.5
        assert figures.seconds_in_flight == 3 + 1 + 1 + 1
        assert figures.seconds_between == 2.0
        assert figures.idle_share == 2.0 / 8.0
        assert figures.shapes["a"].count == 3
        assert figures.shapes["a"].seconds == 5.0
        later = figures.since(before)
        assert later.shapes["a"].count == 2
        assert later.shapes["b"].seconds == 1.0
        assert later.seconds_in_flight == 3.0

    def test_predicts_the_end_from_the_shortest_recent_dispatch(self, monkeypatch):
        now = 0.0
        monkeypatch.setattr("dsv3_jax.engine.stats.time.perf_counter", lambda: now)
        times = DispatchTimes()

        def dispatch(seconds: float, steps: int = 1) -> None:
            nonlocal now
            times.begin_launch()
            now += seconds
            times.finished("a", steps)

        for seconds in (1.0, 4.0):
            times.begin_launch()
            assert times.seconds_left("a") == 0.0  # unknown; a first one loads its program
            now += seconds
            times.finished("a")
        for seconds in (2.0, 5.0, 3.0):
            dispatch(seconds)
        dispatch(0.5, steps=2)  # other work
        times.rest()
        assert times.seconds_left("a") == 0.0  # nothing in flight
        times.begin_launch()
        now += 0.5
        assert times.seconds_left("a") == 1.5
        assert times.seconds_left("b") == 0.0
        now += 1.0
        times.begin_launch()
        assert times.seconds_left("a") == 0.0  # another one waits after it
        now += 1.0
        times.finished("a")
        assert times.seconds_left("a") == 2.0  # the second one runs since then
        now += 3.0
        assert times.seconds_left("a") == 0.0  # late
        times.finished("a")
        for _ in range(8):
            dispatch(6.0)
        times.begin_launch()
        assert times.seconds_left("a") == 6.0  # the last eight count
        now += 7.0
        times.finished("a", is_late=True)
        times.begin_launch()
        assert times.seconds_left("a") == 0.0  # they were too long
        now += 1.0
        times.finished("a")
        times.begin_launch()
        assert times.seconds_left("a") == 1.0
