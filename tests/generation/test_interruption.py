"""Ctrl-C ends generation soon, with the completions so far, and never in mid-update."""

import dataclasses
import gc
import signal
import threading

import jax
import pytest

from dsv3_jax.generation import batch, step_times
from dsv3_jax.generation.errors import Interrupted
from dsv3_jax.generation.generator import Generator
from dsv3_jax.generation.programs import Programs
from dsv3_jax.generation.step_times import StepTimes
from tests.generation.fragments import letters

PROMPTS = [letters(text) for text in ("one", "another", "a third", "four", "and the last")]
SETTINGS = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 1.0, "seed": 3}


def signal_at(generator: Generator, monkeypatch, *dispatches: int, program: str = "decode") -> None:
    """Sends SIGINT to this process during the dispatches with these numbers, counted from 1."""
    run, count = getattr(generator._programs, program), 0

    def counted(*args):
        nonlocal count
        count += 1
        state = run(*args)
        for _ in range(dispatches.count(count)):
            signal.raise_signal(signal.SIGINT)
        return state

    programs = dataclasses.replace(generator._programs, **{program: counted})
    monkeypatch.setattr(generator, "_programs", programs)


@pytest.fixture
def short_dispatches(monkeypatch):
    """Makes every dispatch one step long."""
    monkeypatch.setattr(step_times, "DISPATCH_SECONDS", 0.0)


@pytest.fixture(scope="module")
def want(generator):
    return list(generator.generate(PROMPTS, **SETTINGS))


@pytest.mark.slow
def test_completions_so_far(generator, want, monkeypatch, short_dispatches):
    before = signal.getsignal(signal.SIGINT)
    signal_at(generator, monkeypatch, 7)
    with pytest.raises(Interrupted) as error:
        generator.generate(PROMPTS, **SETTINGS)
    assert signal.getsignal(signal.SIGINT) is before
    assert isinstance(error.value, KeyboardInterrupt)
    got = error.value.generation
    assert [c.finish_reason for c in got] == ["interrupted"] * 5
    assert [len(c.tokens) for c in got] == [7, 7, 7, 7, 0]  # batches of four
    for a, b in zip(got, want, strict=True):
        assert a.tokens == b.tokens[: len(a.tokens)]
        assert a.logprobs == b.logprobs[: len(a.tokens)]
        assert a.prompt_tokens == b.prompt_tokens
    assert got.stats.new_tokens == 28
    assert list(generator.generate(PROMPTS, **SETTINGS)) == want


def test_those_at_their_end_are_whole(generator, want, monkeypatch, short_dispatches):
    signal_at(generator, monkeypatch, 7)
    lengths = [3, 40, 40, 7, 40]
    with pytest.raises(Interrupted) as error:
        generator.generate(PROMPTS, **SETTINGS | {"max_new_tokens": lengths})
    got = error.value.generation
    reasons = ["length", "interrupted", "interrupted", "length", "interrupted"]
    assert [c.finish_reason for c in got] == reasons
    assert [len(c.tokens) for c in got] == [3, 7, 7, 7, 0]


@pytest.mark.parametrize(("dispatches", "program"), [((3, 3), "decode"), ((1,), "prefill")])
def test_at_other_moments(generator, want, monkeypatch, short_dispatches, dispatches, program):
    """A second signal is delivered during the dispatch. Prefill can be interrupted too."""
    signal_at(generator, monkeypatch, *dispatches, program=program)
    with pytest.raises(Interrupted) as error:
        generator.generate(PROMPTS, **SETTINGS)
    for a, b in zip(error.value.generation, want, strict=True):
        assert a.tokens == b.tokens[: len(a.tokens)]
        assert len(a.tokens) <= 2


def test_a_handler_of_the_program_decides(generator, want, monkeypatch, short_dispatches):
    seen = []
    before = signal.signal(signal.SIGINT, lambda *args: seen.append(args))
    try:
        signal_at(generator, monkeypatch, 2, 5)
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
    counts = {"prefill": [], "decode": []}
    originals = generator._programs

    def counted(name, at):
        def run(*args):
            counts[name].append(int(args[at]))
            return getattr(originals, name)(*args)

        return run

    programs = dataclasses.replace(
        originals, prefill=counted("prefill", 1), decode=counted("decode", 2)
    )
    monkeypatch.setattr(generator, "_programs", programs)
    assert list(generator.generate(PROMPTS, **SETTINGS)) == want
    assert set(counts["decode"]) == {1}
    assert counts["prefill"] == [1] * (2 + 3)  # 6 tokens, then 11, in chunks of 4
    assert compilations == []


def test_dispatches_take_as_long_as_they_should(generator, want, monkeypatch):
    """The number of steps follows from the seconds per step that were measured last."""
    asked = []
    decode = generator._programs.decode

    def counted(state, sampling, steps, *drafting):
        asked.append(int(steps))
        return decode(state, sampling, steps, *drafting)

    programs = dataclasses.replace(generator._programs, decode=counted, step_times=StepTimes())
    monkeypatch.setattr(generator, "_programs", programs)
    monkeypatch.setattr(batch, "time", Clock(step=0.1))
    generator.generate(PROMPTS[0], **SETTINGS)
    assert asked[:2] == [1, 1]  # the first included a compilation, as far as the Batch knows
    assert asked[2] == 5  # 0.1 s per step
    assert asked[3] == 25  # 5 steps in 0.1 s


class Clock:
    """A clock that advances by ``step`` seconds each time it is read."""

    def __init__(self, step: float):
        self.step, self.now = step, 0.0

    def perf_counter(self) -> float:
        self.now += self.step
        return self.now


def test_one_cache_at_a_time(generator, monkeypatch):
    """The previous batch has been freed when the next one is created."""
    empty_state, num_caches = Programs.empty_state, []
    shape = generator._programs.empty_state(4).cache.pool.layers[0]["latent"].shape

    def watched(self, *args, **kwargs):
        num_caches.append(sum(x.shape == shape for x in jax.live_arrays()))
        return empty_state(self, *args, **kwargs)

    monkeypatch.setattr(Programs, "empty_state", watched)
    gc.collect()  # garbage of other tests
    generator.generate(PROMPTS * 2, **SETTINGS)
    assert len(num_caches) == 3
    assert num_caches == num_caches[:1] * 3


def test_an_interrupted_call_frees_its_cache(generator, monkeypatch, short_dispatches):
    """The exception and its traceback may exist for long, but the cache does not."""
    shape = generator._programs.empty_state(4).cache.pool.layers[0]["latent"].shape
    gc.collect()  # garbage of other tests
    before = sum(x.shape == shape for x in jax.live_arrays())
    signal_at(generator, monkeypatch, 2)
    with pytest.raises(Interrupted) as error:
        generator.generate(PROMPTS, **SETTINGS)
    assert error.value.generation[0].tokens
    assert sum(x.shape == shape for x in jax.live_arrays()) == before
