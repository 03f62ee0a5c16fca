"""The engine's loop: its thread, its ends, and errors of one request or of the device."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dsv3_jax.engine import EngineError, EngineRequest, QueueFullError
from dsv3_jax.engine.loop import SWITCH_SECONDS
from dsv3_jax.engine.step_loop import LEAD_SECONDS
from dsv3_jax.generation.errors import NonFiniteLogitsError, RequestError
from tests.engine.simulated_device import VOCABULARY
from tests.engine.simulated_engine import BROKEN, SimulatedEngine, Submitted
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint

THREADS = 8
SECONDS = 30
"""Most seconds that anything here waits before the test fails."""


def make(**changes) -> SimulatedEngine:
    options = {
        "num_pages": 24,
        "max_waiting": 100,
        "drafts": 1,
        "background": True,
        "latency": lambda: 0.0003,
    }
    return SimulatedEngine(**(options | changes))


def submit(engine: SimulatedEngine, number: int, new: int = 12, **settings) -> Submitted:
    return engine.submit([number % VOCABULARY, 5, 5, 5, 5, number % 4], new, **settings)


def consume(handle: EngineRequest, number: int) -> list[int]:
    """Returns a request's tokens by one of the three ways to get them."""
    if number % 3 == 0:
        return handle.result(SECONDS).tokens
    if number % 3 == 1:
        return [token for piece in handle for token in piece.tokens]

    async def collect() -> list[int]:
        return [token async for piece in handle for token in piece.tokens]

    return asyncio.run(asyncio.wait_for(collect(), SECONDS))


def in_threads(work, count: int = THREADS) -> list:
    """Runs ``work(i)`` in threads at the same time."""
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, i) for i in range(count)]
        return [future.result(SECONDS) for future in futures]


def test_eight_threads_submit_cancel_and_read():
    engine = make()

    def work(thread: int) -> None:
        random = np.random.default_rng(thread)
        for i in range(12):
            one = submit(engine, thread + 8 * i, int(random.integers(1, 16)))
            is_cancelled = random.random() < 0.25
            if is_cancelled:
                threading.Thread(target=one.handle.cancel).start()
            tokens = consume(one.handle, thread + i)
            assert tokens == one.expected[: len(tokens)]
            assert is_cancelled or tokens == one.expected
            engine.loop.check_integrity()
            engine.loop.stats()

    in_threads(work)
    engine.loop.shutdown(timeout=SECONDS)
    engine.scheduler.check_idle()


@pytest.mark.parametrize("name", ["dispatch", "wait"])
def test_an_error_of_the_device_ends_every_request(name):
    engine = make()
    handles: list[EngineRequest] = []

    def submit_on_and_on(thread: int) -> None:
        for i in range(100_000):
            try:
                handles.append(submit(engine, thread + 8 * i).handle)
            except QueueFullError:
                time.sleep(0.001)
            if thread == 0 and i == 20:
                engine.executor.fails_at = name

    def work(thread: int) -> None:
        with pytest.raises(EngineError, match=f"a step failed: the device failed in {name}"):
            submit_on_and_on(thread)

    in_threads(work)
    engine.loop.shutdown(timeout=SECONDS)
    ends = [handle_error(handle) for handle in handles]
    assert sum(isinstance(end, EngineError) for end in ends) > 1
    assert len({id(end) for end in ends if end}) == sum(end is not None for end in ends)
    engine.loop.check_integrity()
    engine.scheduler.check_idle()
    assert engine.executor.is_closed


def handle_error(handle: EngineRequest) -> Exception | None:
    """Returns the error that a request ended with, or None if it has a completion."""
    assert handle.is_done
    try:
        handle.result(0)
    except EngineError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("drain", "timeout", "reasons"),
    [
        (True, None, {"length"}),
        (True, 0.02, {"length", "cancelled"}),
        (False, None, {"length", "cancelled"}),
    ],
)
@pytest.mark.parametrize("background", [True, False])
def test_shutdown_from_any_thread(drain, timeout, reasons, background):
    engine = make(background=background, stop=None, latency=lambda: 0.001)
    requests = [submit(engine, i, 40) for i in range(12)]
    in_threads(lambda _: engine.loop.shutdown(drain=drain, timeout=timeout), 3)
    got = {request.handle.result(0).finish_reason for request in requests}
    assert got <= reasons
    assert "cancelled" in got or "cancelled" not in reasons
    with pytest.raises(EngineError, match="shut down"):
        submit(engine, 0)
    engine.scheduler.check_idle()
    assert engine.executor.is_closed
    engine.loop.shutdown()  # again


class TestConsumers:
    def test_one_that_raises(self):
        engine = make()
        one, other = submit(engine, 1), submit(engine, 2)
        with pytest.raises(ZeroDivisionError):
            next(piece for piece in one.handle if 1 / 0)
        assert other.handle.result(SECONDS).tokens == other.expected
        assert one.handle.result(SECONDS).tokens == one.expected
        engine.loop.shutdown()

    def test_one_whose_event_loop_is_closed(self):
        engine = make(background=False)
        one, other = submit(engine, 1), submit(engine, 2)
        pieces = aiter(one.handle)
        loop = asyncio.new_event_loop()
        reader = loop.create_task(anext(pieces))
        loop.run_until_complete(asyncio.sleep(0))
        while not one.handle._listeners:
            loop.run_until_complete(asyncio.sleep(0))
        reader._log_destroy_pending = False
        loop.close()
        engine.loop.shutdown()
        assert other.handle.result(0).tokens == other.expected
        assert one.handle.result(0).tokens == one.expected

    def test_text_that_cannot_be_decoded_ends_its_request_alone(self):
        engine = make(undecodable=4, background=False, stop=None)
        requests = [submit(engine, i) for i in range(14)]
        engine.loop.shutdown()
        failed = [one for one in requests if 4 in one.expected]
        assert 0 < len(failed) < len(requests)
        for one in requests:
            if one in failed:
                with pytest.raises(RequestError, match="expected letters"):
                    one.handle.result(0)
            else:
                assert one.handle.result(0).tokens == one.expected
        engine.scheduler.check_idle()

    def test_reading_an_error_again_does_not_lengthen_its_traceback(self):
        engine = make(background=False)
        one = submit(engine, 1)
        engine.executor.fails_at = "wait"
        with pytest.raises(Exception, match="the device failed"):
            engine.loop.shutdown()
        depths = set()
        for _ in range(3):
            with pytest.raises(EngineError) as error:
                one.handle.result(0)
            depths.add(len(error.traceback))
        assert len(depths) == 1


class TestIdleCheck:
    def test_notices_a_leaked_page(self):
        engine = make(background=False)
        assert not engine.loop.step()
        engine.scheduler.shards[0].pages.allocate(1)
        with pytest.raises(AssertionError, match="an idle engine holds pages"):
            engine.loop.step()
        with pytest.raises(EngineError, match="an idle engine holds pages"):
            submit(engine, 1)

    def test_runs_in_the_thread(self):
        engine = make()
        engine.scheduler.shards[0].pages.allocate(1)
        one = submit(engine, 1)
        assert one.handle.result(SECONDS).tokens == one.expected
        engine.loop._thread.join(SECONDS)
        with pytest.raises(EngineError, match="an idle engine holds pages"):
            submit(engine, 1)


@pytest.mark.parametrize(
    ("background", "before", "expected"),
    [(True, 0.005, SWITCH_SECONDS), (True, 0.0001, 0.0001), (False, 0.005, 0.005)],
)
def test_threads_of_an_engine_get_the_interpreter_soon(background, before, expected):
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(before)
        engine = make(background=background)
        # Python rounds it down to microseconds.
        assert sys.getswitchinterval() == pytest.approx(expected, abs=1.5e-6)
        engine.loop.shutdown()
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.slow
def test_an_interpreter_with_a_running_engine_ends(tmp_path):
    """A thread inside XLA must not abort the process, nor keep it alive."""
    config = tiny_config(num_hidden_layers=1, num_nextn_predict_layers=0)
    write_checkpoint(tmp_path, config, random_tensors(config))
    program = textwrap.dedent(
        f"""
        import dsv3_jax
        from tests.engine.conftest import BUCKETS

        model = dsv3_jax.load({str(tmp_path)!r})[0]
        engine = dsv3_jax.Engine(model, None, 120, max_running=4, buckets=BUCKETS)
        requests = [engine.submit([5, i], max_new_tokens=110, ignore_eos=True) for i in range(100)]
        next(iter(requests[0]))
        print("running", flush=True)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "running\n"
    assert done.returncode == 0
    # The engine ends without a word of its own.
    assert not re.search("Fatal|Traceback|Error", done.stderr)


def test_a_stuck_step_is_given_up():
    """Its requests end with an error, although the step goes on."""
    released = threading.Event()

    def latency() -> float:
        released.wait(SECONDS)
        return 0.0

    engine = make(latency=latency)
    assert engine.loop.step_seconds == 0
    handles = [submit(engine, i).handle for i in range(6)]
    while engine.loop.step_seconds < 0.05:
        time.sleep(0.01)
    engine.loop.fail_if_stuck(10)
    assert engine.loop.failure is None
    engine.loop.fail_if_stuck(0.05)
    for handle in handles:
        with pytest.raises(EngineError, match=r"a step has taken more than 0\.05 s"):
            handle.result(SECONDS)
    with pytest.raises(EngineError, match="its device is stuck"):
        submit(engine, 7)
    assert engine.loop.stats().running == 0
    first = engine.loop.failure
    released.set()  # the device answers after all, and is not heard
    engine.loop.shutdown()
    assert engine.loop.failure is first
    assert engine.executor.is_closed


def test_the_end_waits_for_a_launch_of_another_thread():
    engine = make(background=False)
    saving, closed = threading.Event(), threading.Event()
    save, close = engine.executor.save, engine.executor.close
    was_closed = []

    def save_slowly(saves):
        saving.set()
        was_closed.append(closed.wait(0.3))
        return save(saves)

    engine.executor.save = save_slowly
    engine.executor.close = lambda: close() or closed.set()
    engine.loop._wait_for_requests = lambda: not saving.wait(SECONDS)  # the thread ends then
    engine.loop.start()
    engine.loop.save_pages().result(SECONDS)
    engine.loop.shutdown(timeout=SECONDS)
    assert engine.executor.is_closed
    assert was_closed == [False]


@pytest.mark.parametrize("overlap", [True, False])
def test_no_request_reuses_pages_of_logits_that_are_not_finite(overlap):
    engine = make(background=False, stop=None, overlap=overlap)
    prompt = [BROKEN, *range(5), *range(5), *range(5)]
    handles = [engine.submit(prompt, 5).handle for _ in range(2)]
    while engine.loop.step():
        engine.loop.check_integrity()
    for handle in handles:
        with pytest.raises(NonFiniteLogitsError):
            handle.result(SECONDS)
    assert engine.scheduler.shards[0].pages.cached_prefix([*prompt, 0]) == []
    hits = engine.loop.stats().prefix_hit_tokens
    handle = engine.submit(prompt, 5).handle
    while engine.loop.step():
        pass
    with pytest.raises(NonFiniteLogitsError):
        handle.result(SECONDS)
    assert engine.loop.stats().prefix_hit_tokens == hits


def test_the_end_waits_for_no_compilation_unless_it_has_to():
    """The thread ends after it, with the memory that it had on the device."""
    compiling, compiled = threading.Event(), threading.Event()
    engine = make(background=False)
    wait = engine.executor.wait

    def compile_and_wait():
        if not compiled.is_set():
            with engine.loop._compilations.measure("decodes=4"):
                compiling.set()
                assert compiled.wait(SECONDS)
        return wait()

    engine.executor.wait = compile_and_wait
    engine.loop.start()
    handle = submit(engine, 1).handle
    assert compiling.wait(SECONDS)
    engine.loop.shutdown(drain=False, abandons_compilations=True)
    assert not handle.is_done
    with ThreadPoolExecutor(1) as threads:
        ending = threads.submit(engine.loop.shutdown, drain=False)
        assert not ending.done()
        compiled.set()
        ending.result(SECONDS)
    assert engine.executor.is_closed
    assert handle.result(0).finish_reason == "cancelled"


def test_a_request_that_arrives_during_a_step_is_in_the_next_one():
    """A step is planned when the one in flight is about to end, while there are free slots."""
    engine = make(background=False, stop=None)
    dispatch, sleeps = engine.executor.dispatch, []
    planned, arrivals = [], []

    def record(plan):
        planned.append([chunk.request.tokens[0] for chunk in plan.chunks])
        dispatch(plan)

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            arrivals.append((len(planned), engine.executor.dispatches_in_flight))
            submit(engine, 2, 2)

    engine.loop.sleep = sleep
    engine.executor.dispatch = record
    engine.executor.seconds_left = 100.0
    engine.loop.start()
    submit(engine, 1, 14).handle.result(SECONDS)
    engine.loop.shutdown(timeout=SECONDS)
    ((steps, in_flight),) = arrivals
    assert in_flight == 1, "the next step must not be dispatched yet"
    assert 2 in planned[steps]
    assert all(90 < seconds <= 100 - LEAD_SECONDS for seconds in sleeps)


@pytest.mark.parametrize(("max_running", "seconds_left"), [(1, 100.0), (4, 0.0)])
def test_planning_does_not_wait_for_nothing(max_running, seconds_left):
    """It does not without a free slot, or without a forecast."""
    sleeps = []
    engine = make(background=False, max_running=max_running, stop=None)
    # Before the request is admitted, and after its end, there are free slots.
    engine.loop.sleep = lambda seconds: sleeps.append(len(engine.scheduler.running))
    engine.executor.seconds_left = seconds_left
    engine.loop.start()
    submit(engine, 1, 40).handle.result(SECONDS)
    engine.loop.shutdown(timeout=SECONDS)
    assert bool(sleeps) == bool(seconds_left)
    assert not any(sleeps)


def test_planning_waits_in_the_engines_own_thread_alone():
    engine = make(background=False, latency=lambda: 0.0, stop=None)
    engine.executor.seconds_left = 10.0
    request = submit(engine, 1, 4)
    began = time.monotonic()
    while engine.loop.step():
        pass
    assert request.handle.result(0).tokens == request.expected
    assert time.monotonic() - began < 5
