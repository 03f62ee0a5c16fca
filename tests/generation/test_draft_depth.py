"""The depth that a request chooses from its own acceptance."""

from __future__ import annotations

from collections import deque

import pytest

from dsv3_jax.generation.depth import DraftDepth


def run(depth: DraftDepth, steps: int, accepts: int, late: int = 1) -> list[int]:
    """Chooses depths while the first ``accepts`` drafts of a step are accepted. Results arrive
    ``late`` steps after their choice."""
    chosen, unread = [], deque()
    for _ in range(steps):
        chosen.append(depth.choose())
        unread.append(chosen[-1])
        while len(unread) > late:
            drafted = unread.popleft()
            depth.observe(drafted, min(drafted, accepts))
    return chosen


@pytest.mark.parametrize("late", [0, 1, 3])
def test_goes_down_to_zero_and_probes(late):
    chosen = run(DraftDepth(4), 100, accepts=0, late=late)
    assert chosen[0] == 2
    assert set(chosen[20:]) == {0, 1}
    assert sum(chosen[20:]) == 5  # in 80 steps


@pytest.mark.parametrize("accepts", [1, 2, 3, 4])
def test_settles_at_what_is_accepted(accepts):
    chosen = run(DraftDepth(4), 300, accepts)[-64:]
    assert chosen.count(accepts) >= 60
    assert max(chosen) <= min(accepts + 1, 4)


def test_returns_after_a_bad_part_of_the_text():
    depth = DraftDepth(4)
    run(depth, 200, accepts=0)
    assert run(depth, 400, accepts=4)[-1] == 4


def test_drafts_after_a_rejected_one_do_not_count():
    first, second = DraftDepth(4), DraftDepth(4)
    for _ in range(10):
        first.observe(4, 0)
        second.observe(1, 0)
    assert [first.choose() for _ in range(16)] == [second.choose() for _ in range(16)]


def test_without_drafts_nothing_is_learned():
    depth = DraftDepth(2)
    for _ in range(50):
        depth.observe(0, 0)
    assert depth.choose() == 2
