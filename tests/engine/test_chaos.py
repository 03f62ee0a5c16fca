"""Random operations in any order leave pages, slots, queues and handles consistent.

Most of them run on a simulated device, which checks what attention reads. ``--covering-seed N``
selects other operations; a failure prints the seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from dsv3_jax.engine import EngineError, QueueFullError
from dsv3_jax.generation.errors import NonFiniteLogitsError
from tests.engine.simulated_device import VOCABULARY
from tests.engine.simulated_engine import BROKEN, DeviceError, SimulatedEngine, Submitted

OPERATIONS = 10_000
PER_EPISODE = 100


@contextlib.contextmanager
def noted(note: str) -> Iterator[None]:
    """Adds a note to an error, so that it can be reproduced."""
    try:
        yield
    except BaseException as error:
        error.add_note(note)
        raise


@pytest.fixture
def seed(request) -> int:
    return request.config.getoption("--covering-seed")


def options(random: np.random.Generator, *, swaps: bool) -> dict:
    """Random options of an engine that always lacks something.

    Args:
      swaps: whether preempted requests move to host memory, as in deterministic mode.
    """
    made = {
        "num_pages": int(random.integers(11, 20)),
        "max_running": int(random.integers(1, 7)),
        "stop": random.choice([None, 3]),
        "drafts": int(random.integers(0, 4)),
        "lookahead": int(random.integers(0, 2)),
        "prefix_cache": random.random() < 0.8,
        "overlap": random.random() < 0.8,
        "shards": int(random.choice([1, 1, 2])),
    }
    return made | {"swap_pages": int(random.choice([0, 20, 60]))} if swaps else made


def submit(engine: SimulatedEngine, random: np.random.Generator) -> Submitted:
    """Submits a random request. Many prompts begin alike."""
    prompt = random.integers(0, VOCABULARY, int(random.integers(1, 20))).tolist()
    if random.random() < 0.5:
        shared = int(random.integers(0, len(prompt)))
        prompt[:shared] = [5] * shared
    if random.random() < 0.03:
        prompt[0] = BROKEN
    return engine.submit(
        prompt,
        int(random.integers(1, 20)),
        stop=("ab", "ce") if random.random() < 0.3 else (),
        priority=int(random.integers(-1, 2)),
        timeout=float(random.choice([0.0, 0.002, np.inf], p=[0.05, 0.1, 0.85])),
        draft=random.random() < 0.7,
    )


def check(submitted: Submitted, *, was_cancelled: bool, has_failed: bool) -> str:
    """Checks the end of a request and returns the reason for it."""
    handle, expected = submitted.handle, submitted.expected
    assert handle.is_done, "a handle has no end"
    try:
        completion = handle.result(0)
    except NonFiniteLogitsError:
        assert submitted.request.prompt[0] == BROKEN
        return "error"
    except EngineError:
        assert has_failed
        return "engine error"
    assert "".join(piece.text for piece in handle) == completion.text
    assert [token for piece in handle for token in piece.tokens] == completion.tokens
    assert [value for piece in handle for value in piece.logprobs] == completion.logprobs
    reason = completion.finish_reason
    assert was_cancelled or reason != "cancelled"
    assert submitted.has_deadline or reason != "timeout"
    if reason in ("cancelled", "timeout"):
        assert completion.tokens == expected[: len(completion.tokens)]
    else:
        assert completion.tokens == expected
    return str(reason)


def check_failed(engine: SimulatedEngine, random: np.random.Generator) -> None:
    """Checks that an engine whose device failed holds nothing and refuses requests."""
    with pytest.raises(EngineError, match="the device failed"):
        submit(engine, random)
    engine.loop.check_integrity()
    engine.scheduler.check_idle()
    assert engine.executor.is_closed


class Episode:
    """Random operations on one engine, until its end or an error of the device."""

    def __init__(self, random: np.random.Generator, *, swaps: bool):
        self.random = random
        self.engine = SimulatedEngine(**options(random, swaps=swaps))
        self.submitted: list[Submitted] = []
        self.cancelled: set[Submitted] = set()
        self.has_failed = False

    def operate(self) -> None:
        names = ["submit", "cancel", "step", "clear", "break the device"]
        name = self.random.choice(names, p=[0.3, 0.08, 0.58, 0.035, 0.005])
        if name == "submit":
            with contextlib.suppress(QueueFullError):
                self.submitted.append(submit(self.engine, self.random))
        elif name == "cancel" and self.submitted:
            one = self.submitted[int(self.random.integers(len(self.submitted)))]
            if not one.handle.is_done:
                self.cancelled.add(one)
            one.handle.cancel()
        elif name == "clear":
            self.engine.loop.clear_prefix_cache()
        elif name == "break the device":
            self.engine.executor.fails_at = str(self.random.choice(["dispatch", "wait"]))
        else:
            self.step()
        self.engine.loop.check_integrity()

    def step(self) -> bool:
        try:
            return self.engine.loop.step()
        except (DeviceError, EngineError):
            self.has_failed = True
            return False

    def finish(self) -> list[str]:
        """Runs what is left, and returns the reason for the end of each request."""
        while self.step():
            self.engine.loop.check_integrity()
        if self.has_failed:
            check_failed(self.engine, self.random)
        self.engine.scheduler.check_idle()
        return [
            check(one, was_cancelled=one in self.cancelled, has_failed=self.has_failed)
            for one in self.submitted
        ]


@pytest.mark.parametrize("swaps", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ten_thousand_random_operations(seed, swaps):
    ends: dict[str, int] = {}
    preemptions = hits = 0
    operations = episode = 0
    while operations < OPERATIONS:
        episode += 1
        one = Episode(np.random.default_rng([seed, episode]), swaps=swaps)
        for operation in range(PER_EPISODE):
            with noted(f"seed {seed}, episode {episode}, operation {operation}"):
                one.operate()
            operations += 1
            if one.has_failed:
                break
        with noted(f"seed {seed}, episode {episode}, at its end"):
            for reason in one.finish():
                ends[reason] = ends.get(reason, 0) + 1
        stats = one.engine.loop.stats()
        preemptions += stats.preemptions
        hits += stats.prefix_hit_tokens
    assert set(ends) == {"stop", "length", "cancelled", "timeout", "error", "engine error"}
    assert min(ends.values()) >= 5
    assert preemptions > (10 if swaps else 50)
    # In deterministic mode whole chunks alone are shared, and most prompts are shorter.
    assert swaps or hits > 500
