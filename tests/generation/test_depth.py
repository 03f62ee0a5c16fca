"""DepthChooser on made-up acceptance rates and costs."""

import numpy as np
import pytest

from dsv3_jax.generation.depth import AUTO_DEPTHS, DepthChooser


def live(chooser: DepthChooser, acceptance: float, costs: dict[int, float], dispatches: int):
    """Lets the chooser choose and observe; returns the depths. All drafts have one acceptance."""
    rng = np.random.default_rng(0)
    chosen = []
    for _ in range(dispatches):
        depth = chooser.choose()
        run = (rng.random((200, 4)) < acceptance).cumprod(axis=1)
        offered = [200 * (k < depth) for k in range(4)]
        accepted = [int(run[:, k].sum()) if k < depth else 0 for k in range(4)]
        chooser.observe(depth, offered, accepted, 10, 10 * costs[depth])
        chosen.append(depth)
    return chosen


def best(acceptance: float, costs: dict[int, float]) -> int:
    return max(costs, key=lambda d: sum(acceptance**k for k in range(d + 1)) / costs[d])


FREE = dict.fromkeys(AUTO_DEPTHS, 1.0)
DEAR = {0: 1.0, 1: 1.3, 2: 1.6, 4: 2.2}


@pytest.mark.parametrize(
    ("acceptance", "costs", "expected"),
    [(0.9, FREE, 4), (0.05, DEAR, 0), (0.6, DEAR, 1), (0.9, DEAR, 4), (0.0, FREE | {0: 0.9}, 0)],
)
def test_settles_on_the_fastest_depth(acceptance, costs, expected):
    assert best(acceptance, costs) == expected
    chosen = live(DepthChooser(AUTO_DEPTHS), acceptance, costs, 100)
    assert chosen[:4] == list(AUTO_DEPTHS), "each cost is measured once"
    assert chosen[20:].count(expected) >= 0.9 * 80


def test_follows_a_change():
    chooser = DepthChooser(AUTO_DEPTHS)
    live(chooser, 0.9, DEAR, 60)
    assert live(chooser, 0.05, DEAR, 60)[-10:].count(0) >= 9
    # While it does not draft, only the occasional probes show the acceptance.
    assert live(chooser, 0.95, DEAR, 400)[-20:].count(4) >= 18


def test_gets_over_a_cost_that_was_off():
    """The first dispatch at depth 4 was slow, because the machine was busy."""
    chooser = DepthChooser(AUTO_DEPTHS)
    live(chooser, 0.9, DEAR | {4: 100.0}, 4)
    assert live(chooser, 0.9, DEAR, 16).count(4) <= 1
    assert live(chooser, 0.9, DEAR, 600)[-20:].count(4) >= 18


def test_tries_drafts_that_have_never_been_checked():
    """Warming up measures what drafts cost, but not how often they are accepted."""
    chooser = DepthChooser(AUTO_DEPTHS)
    for depth in AUTO_DEPTHS:
        chooser.observe(depth, [0] * 4, [0] * 4, 10, 10 * DEAR[depth])
    assert live(chooser, 0.9, DEAR, 10) == [4] * 10
    fresh = DepthChooser(AUTO_DEPTHS)
    for depth in AUTO_DEPTHS:
        fresh.observe(depth, [0] * 4, [0] * 4, 10, 10 * DEAR[depth])
    assert live(fresh, 0.05, DEAR, 8) == [4] + [0] * 7, "one dispatch shows that they are not"


def test_a_dispatch_that_compiled_has_no_cost():
    chooser = DepthChooser((1, 2))
    assert chooser.choose() == 1
    chooser.observe(1, [5, 0], [2, 0], 5, None)
    assert chooser.unmeasured == [1, 2]
    chooser.observe(1, [5, 0], [2, 0], 5, 0.1)
    assert chooser.unmeasured == [2]


def test_a_short_dispatch_hardly_changes_the_cost():
    """A dispatch of one step, which has the overhead of a whole dispatch, between long ones."""
    chooser = DepthChooser((0, 1))
    for steps, seconds in ((32, 32.0), (1, 9.0), (32, 32.0)):
        chooser.observe(0, [0], [0], steps, seconds)
    chooser.observe(1, [32], [16], 32, 32 * 1.4)
    assert chooser.choose() == 1, "1.5 tokens for 1.4 pays"
    for _ in range(3):
        chooser.observe(1, [32], [2], 32, 32 * 1.4)
    assert chooser.choose() == 0


def test_one_depth_is_fixed():
    chooser = DepthChooser((3,))
    assert chooser.is_fixed
    assert chooser.unmeasured == []
    chooser.observe(3, [9, 9, 9], [0, 0, 0], 9, 5.0)
    assert chooser.choose() == 3


def test_without_drafts():
    chooser = DepthChooser((0,))
    chooser.observe(0, [], [], 7, 0.1)
    assert chooser.choose() == 0
