"""Text is decoded in a thread of its own: it delays no step, and changes no result."""

from __future__ import annotations

import functools
import threading
import time
import weakref

import pytest

from dsv3_jax.engine.requests import delivery
from dsv3_jax.engine.requests.request import EngineRequest
from dsv3_jax.engine.stats import HostTimes
from dsv3_jax.generation.errors import EngineError, RequestError
from tests.engine.simulated_engine import Letters, SimulatedEngine

SECONDS = 60
SLOW = 4
"""The slow tokenizer waits at this token."""


class SlowLetters(Letters):
    """A tokenizer that takes long for a token, until it may go on."""

    def __init__(self):
        super().__init__()
        self.began, self.may_go_on = threading.Event(), threading.Event()

    def decode(self, ids):
        if SLOW in ids:
            self.began.set()
            assert self.may_go_on.wait(SECONDS)
        return super().decode(ids)


def make(**changes) -> SimulatedEngine:
    options = {"num_pages": 64, "stop": None, "max_running": 4}
    return SimulatedEngine(**{**options, **changes})


def make_slow() -> tuple[SimulatedEngine, SlowLetters]:
    engine, letters = make(), SlowLetters()
    engine._tokenizer = letters
    engine.loop.start()
    return engine, letters


def wait_until(condition) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_steps_go_on_while_text_is_slow():
    engine, letters = make_slow()
    slow = engine.submit([1, 2], 20, stop=("zz",))
    assert SLOW in slow.expected[:6]
    assert letters.began.wait(SECONDS)
    engine._tokenizer = Letters()
    others = [engine.submit([i, 3], 12) for i in range(3)]
    wait_until(lambda: not engine.scheduler.unfinished)
    engine.loop.check_integrity()
    assert not any(each.handle.is_done for each in (slow, *others))
    engine.loop.stats()
    letters.may_go_on.set()
    for each in (slow, *others):
        assert each.handle.result(SECONDS).tokens == each.expected
    engine.loop.shutdown(timeout=SECONDS)


def test_the_loop_waits_for_text_that_is_too_far_behind(monkeypatch):
    monkeypatch.setattr(delivery, "_MOST_BEHIND", 5)
    engine, letters = make_slow()
    dispatch, steps = engine.executor.dispatch, []
    engine.executor.dispatch = lambda plan: steps.append(plan) or dispatch(plan)
    slow = engine.submit([1, 2], 150)  # about fifty dispatches
    assert letters.began.wait(SECONDS)
    room = engine.loop._delivery._room
    wait_until(lambda: len(steps) > 5 and not room._value)
    engine.loop.stats()  # needs the lock
    # Those whose text came before the slow token's, and a few that were launched already.
    assert len(steps) < 16
    letters.may_go_on.set()
    assert slow.handle.result(SECONDS).tokens == slow.expected
    engine.loop.shutdown(timeout=SECONDS)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("drafts", [0, 2])
def test_stop_strings_end_at_the_same_token_as_without_the_thread(background, drafts):
    engine = make(background=background, drafts=drafts)
    requests = [engine.submit([i % 5, 5, i % 4], 30, stop=("cd", "ea")) for i in range(6)]
    while not background and engine.loop.step():
        engine.loop.check_integrity()
    for each in requests:
        completion = each.handle.result(SECONDS)
        assert completion.tokens == each.expected
        text = Letters().decode(each.expected)
        ends = [text.find(stop) for stop in each.request.stop if stop in text]
        assert completion.text == text[: min(ends, default=len(text))]
        assert completion.finish_reason == ("stop" if ends else "length")
        pieces = each.handle.pieces_from(0)
        assert "".join(pieces) == completion.text
        assert [token for piece in pieces for token in piece.tokens] == completion.tokens
        assert [piece.finish_reason is None for piece in pieces] == [True] * (len(pieces) - 1) + [
            False
        ]
    engine.loop.shutdown(timeout=SECONDS)
    engine.scheduler.check_idle()


def test_a_stop_string_ends_the_request_in_the_scheduler():
    engine = make(background=True, num_pages=400, latency=lambda: 0.001)
    request = engine.submit([1, 2], 1000, stop=("d",))
    assert request.handle.result(SECONDS).tokens == request.expected
    wait_until(lambda: not engine.scheduler.unfinished)
    assert engine.loop.stats().output_tokens < 500
    engine.loop.shutdown(timeout=SECONDS)


def test_what_was_delivered_is_freed():
    """A request that has ended does not live until there is text of another one."""
    results = delivery.Delivery(HostTimes())
    results.start()
    done = threading.Event()
    work = functools.partial(done.set)
    alive = weakref.ref(work)
    results._hand_over(work)
    del work
    assert done.wait(SECONDS)
    wait_until(lambda: alive() is None)
    results.close()


def test_text_that_fails_ends_its_request_alone():
    engine = make(background=True, undecodable=SLOW)
    bad = engine.submit([1, 2], 20)
    assert SLOW in bad.expected
    with pytest.raises(RequestError, match="expected letters"):
        bad.handle.result(SECONDS)
    engine._tokenizer = Letters()
    good = engine.submit([1, 2], 20)
    assert good.handle.result(SECONDS).tokens == good.expected
    engine.loop.shutdown(timeout=SECONDS)
    engine.scheduler.check_idle()


def test_a_panic_of_the_tokenizer_does_not_end_the_thread(monkeypatch):
    class Panic(BaseException):
        pass

    def panic(ids):
        raise Panic("index out of range")

    engine, letters = make(background=True), Letters()
    monkeypatch.setattr(letters, "decode", panic)
    engine._tokenizer = letters
    with pytest.raises(RequestError, match="index out of range"):
        engine.submit([1, 2], 20).handle.result(SECONDS)
    engine._tokenizer = Letters()
    good = engine.submit([1, 2], 20)
    assert good.handle.result(SECONDS).tokens == good.expected
    engine.loop.shutdown(timeout=SECONDS)


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown_delivers_what_was_read(drain):
    engine, letters = make_slow()
    request = engine.submit([1, 2], 20)
    assert letters.began.wait(SECONDS)
    ending = threading.Thread(target=engine.loop.shutdown, kwargs={"drain": drain})
    ending.start()
    time.sleep(0.1)
    assert not request.handle.is_done
    letters.may_go_on.set()
    ending.join(SECONDS)
    completion = request.handle.result(0)
    assert completion.tokens == request.expected[: len(completion.tokens)]
    assert SLOW in completion.tokens
    assert completion.finish_reason in ("length", "cancelled")
    assert not drain or completion.tokens == request.expected


def test_an_error_of_the_device_comes_after_the_text_before_it():
    engine, letters = make_slow()
    request = engine.submit([1, 2], 1000 // 5)
    assert letters.began.wait(SECONDS)
    wait_until(lambda: engine.loop.stats().output_tokens > 12)
    engine.executor.fails_at = "wait"
    wait_until(lambda: engine.loop.failure is not None)
    letters.may_go_on.set()
    tokens: list[int] = []
    with pytest.raises(EngineError, match="a step failed"):
        read(request.handle, tokens)
    assert len(tokens) > 12
    assert tokens == request.expected[: len(tokens)]


def read(handle: EngineRequest, tokens: list[int]) -> None:
    for piece in handle:
        tokens += piece.tokens


class Panic(BaseException):
    """Stands for an error of native code, which is no Exception."""


@pytest.mark.parametrize(
    ("background", "error"), [(True, ValueError), (True, Panic), (False, ValueError)]
)
def test_a_listener_that_always_fails_ends_its_request_alone(background, error, monkeypatch):
    """Also if it fails again at the end: no other request loses text, and the loop goes on."""
    monkeypatch.setattr(delivery, "_MOST_BEHIND", 2)
    engine = make()

    def fail():
        raise error("never")

    broken = [engine.submit([i, 2], 12) for i in range(3)]
    for each in broken:
        each.handle.add_listener(fail)
    others = [engine.submit([i, 3], 40) for i in range(2)]
    if background:
        engine.loop.start()
    while not background and engine.loop.step():
        pass
    for each in others:
        assert each.handle.result(SECONDS).tokens == each.expected
    for each in broken:
        with pytest.raises(RequestError, match="never"):
            each.handle.result(SECONDS)
    engine.loop.shutdown(timeout=SECONDS)
    engine.scheduler.check_idle()
