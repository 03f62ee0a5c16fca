"""Ctrl-C ends generation soon, with the completions so far, and never in mid-update."""

import gc
import signal
import threading

import jax
import pytest

from dsv3_jax.engine.device.programs import Programs
from dsv3_jax.engine.scheduling.step_plan import (
    RequestResult,
    ScheduledRequest,
    StepPlan,
    StepTokens,
)
from dsv3_jax.engine.scheduling.step_sizes import StepTimes
from dsv3_jax.generation.completion import RUNNING
from dsv3_jax.generation.depth import DepthChooser
from dsv3_jax.generation.errors import Interrupted
from dsv3_jax.offline import pace as offline_pace
from dsv3_jax.offline.pace import OfflinePace
from tests.generation.fragments import letters, watch_dispatches

PROMPTS = [letters(text) for text in ("one", "another", "a third", "four", "and the last")]
SETTINGS = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 3}


def signal_at(monkeypatch, *dispatches: int, program: str = "decode") -> None:
    """Sends SIGINT to this process during the dispatches with these numbers, counted from 1."""
    count = 0

    def counted(plan: StepPlan) -> None:
        nonlocal count
        count += bool(plan.chunks) == (program == "prefill")
        if bool(plan.chunks) == (program == "prefill"):
            for _ in range(dispatches.count(count)):
                signal.raise_signal(signal.SIGINT)

    watch_dispatches(monkeypatch, counted)


@pytest.fixture
def short_dispatches(monkeypatch):
    """Makes every dispatch one step long."""
    monkeypatch.setattr(offline_pace, "DISPATCH_SECONDS", 0.0)


@pytest.fixture(scope="module")
def want(generator):
    return list(generator.generate(PROMPTS, **SETTINGS))


@pytest.mark.slow
def test_completions_so_far(generator, want, monkeypatch, short_dispatches):
    before = signal.getsignal(signal.SIGINT)
    signal_at(monkeypatch, 7)
    with pytest.raises(Interrupted) as error:
        generator.generate(PROMPTS, **SETTINGS)
    assert signal.getsignal(signal.SIGINT) is before
    assert isinstance(error.value, KeyboardInterrupt)
    got = error.value.generation
    assert [c.finish_reason for c in got] == ["interrupted"] * 5
    assert [len(c.tokens) for c in got] == [8, 8, 8, 8, 0]  # one of the prefill; four at a time
    for a, b in zip(got, want, strict=True):
        assert a.tokens == b.tokens[: len(a.tokens)]
        assert a.logprobs == b.logprobs[: len(a.tokens)]
        assert a.prompt_tokens == b.prompt_tokens
    assert got.stats.new_tokens == 32
    assert list(generator.generate(PROMPTS, **SETTINGS)) == want


def test_those_at_their_end_are_whole(generator, want, monkeypatch, short_dispatches):
    signal_at(monkeypatch, 7)
    lengths = [3, 40, 40, 7, 40]
    with pytest.raises(Interrupted) as error:
        generator.generate(PROMPTS, **SETTINGS | {"max_new_tokens": lengths})
    got = error.value.generation
    reasons = ["length", "interrupted", "interrupted", "length", "interrupted"]
    assert [c.finish_reason for c in got] == reasons
    # The last one has the slot of the first one since the second decode step.
    assert [len(c.tokens) for c in got] == [3, 8, 8, 7, 6]


@pytest.mark.parametrize(("dispatches", "program"), [((3, 3), "decode"), ((1,), "prefill")])
def test_at_other_moments(generator, want, monkeypatch, short_dispatches, dispatches, program):
    """A second signal is delivered during the dispatch. Prefill can be interrupted too."""
    signal_at(monkeypatch, *dispatches, program=program)
    with pytest.raises(Interrupted) as error:
        generator.generate(PROMPTS, **SETTINGS)
    for a, b in zip(error.value.generation, want, strict=True):
        assert a.tokens == b.tokens[: len(a.tokens)]
        assert len(a.tokens) <= 3


def test_a_handler_of_the_program_decides(generator, want, monkeypatch, short_dispatches):
    seen = []
    before = signal.signal(signal.SIGINT, lambda *args: seen.append(args))
    try:
        signal_at(monkeypatch, 2, 5)
        assert list(generator.generate(PROMPTS, **SETTINGS)) == want
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(seen) == 2


def test_in_another_thread(generator, want):
    got = []
    thread = threading.Thread(target=lambda: got.extend(generator.generate(PROMPTS, **SETTINGS)))
    thread.start()
    thread.join()
    assert got == want


def test_short_dispatches_change_nothing_and_compile_nothing(
    generator, want, compilations, monkeypatch, short_dispatches
):
    plans: list[StepPlan] = []
    watch_dispatches(monkeypatch, plans.append)
    assert list(generator.generate(PROMPTS, **SETTINGS)) == want
    assert {plan.decode_steps for plan in plans} == {1}
    # Chunks of 4 of prompts of 3, 7, 7, 4 and 12 tokens, at most 4 in a step.
    assert [len(plan.chunks) for plan in plans if plan.chunks] == [4, 2, 3]
    assert compilations == []


def test_dispatches_take_as_long_as_they_should():
    """The number of steps follows from the seconds per step that were measured last."""
    chooser, clock = DepthChooser((0,)), Clock()
    pace = OfflinePace(
        chooser,
        StepTimes(),
        "program",
        tokens=None,
        max_over_processes=float,
        clock=clock,
    )
    asked = []
    for seconds in (9.0, 0.1, 0.1, 0.1):
        steps, depth = pace.choose(100)
        asked.append(steps)
        plan = StepPlan((), steps, depth)
        clock.now += seconds
        pace.read(plan, [decoded(steps)], clock.now)
    assert asked == [1, 1, 5, 25]  # the first one loads the program; 0.1 s a step; 0.1 s for 5
    assert pace.choose(100)[0] == 100  # the program has no more


def test_dispatches_that_choose_a_depth_are_short():
    """At most 32 steps, or 50 ms of them, or half a second."""
    times = StepTimes()
    pace = OfflinePace(
        DepthChooser((0, 1)), times, "program", tokens=None, max_over_processes=float
    )
    pace.depth, program = 1, ("program", 1)
    assert pace.choose(256) == (32, 1)  # not measured
    asked = []
    for seconds in (1.0, 0.1, 0.01, 0.001, 0.0001):
        for _ in range(2):  # a first run is no measurement
            times.record(program, 10, 10 * seconds)
        asked.append(pace.choose(256)[0])
    assert asked == [1, 5, 32, 50, 256]


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def decoded(steps: int) -> RequestResult:
    """Returns the result of a request that gained a token in every step."""
    tokens = [StepTokens([7], [0.0], 0)] * steps
    return RequestResult(ScheduledRequest([5], 200), tokens, RUNNING, True)


def test_one_cache_for_all_prompts(generator, monkeypatch):
    """Ten prompts take turns in the slots of four, and the cache is freed after the last."""
    states = []
    empty_state = Programs.empty_state

    def watched(self, *args):
        states.append(empty_state(self, *args))
        return states[-1]

    monkeypatch.setattr(Programs, "empty_state", watched)
    generator.generate(PROMPTS * 2, **SETTINGS)
    (state,) = states
    assert state.tokens.shape[0] == 4
    assert all(array.is_deleted() for array in jax.tree.leaves(state))


def test_an_interrupted_call_frees_its_cache(generator, monkeypatch, short_dispatches):
    """The exception and its traceback may exist for long, but the cache does not."""
    gc.collect()  # garbage of other tests
    before = len(jax.live_arrays())
    signal_at(monkeypatch, 2)
    with pytest.raises(Interrupted) as error:
        generator.generate(PROMPTS, **SETTINGS)
    assert error.value.generation[0].tokens
    assert len(jax.live_arrays()) == before
