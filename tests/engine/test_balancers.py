"""A request goes to the shard with the least load, or to one that has much of its prompt cached."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from dsv3_jax.engine.scheduling.scheduler_shard import HIT_WORTH, choose_shard, shard_load


def choose(loads: list[int], hits: list[int | None], most_hit: int = 10_000) -> int | None:
    return choose_shard(loads, lambda shard: hits[shard], most_hit)


def test_least_load():
    assert choose([5, 3, 4], [0, 0, 0]) == 1


def test_equal_loads_go_to_the_first():
    assert choose([7, 3, 3], [0, 0, 0]) == 1


def test_no_room():
    assert choose([5, 3, 4], [0, None, 0]) == 2
    assert choose([5, 3], [None, None]) is None


def test_a_hit_outweighs_some_load_and_not_more():
    assert choose([100, 100 + 2 * 64 - 1], [0, 64]) == 1
    assert choose([100, 100 + 2 * 64], [0, 64]) == 0
    assert choose([100, 101], [64, 64]) == 0


def test_load_counts_pages_and_requests():
    assert shard_load(1000, 2) == 1000 + 2 * 256


def test_shards_that_cannot_win_are_not_asked():
    asked = []

    def hit_with_room(shard: int) -> int:
        asked.append(shard)
        return 64 if shard == 1 else 0

    assert choose_shard([300, 0, 10, 129], hit_with_room, 64) == 1
    # The shard without load has everything. The others can only have as much.
    assert asked == [1]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.none() | st.integers(0, 20)), min_size=1, max_size=6),
    st.integers(20, 30),
)
def test_is_the_cheapest_of_all(shards, most_hit):
    """The shards that are not asked could not have been chosen."""
    loads, hits = map(list, zip(*shards, strict=True))
    costs = [
        (load - HIT_WORTH * hit, load, shard)
        for shard, (load, hit) in enumerate(shards)
        if hit is not None
    ]
    assert choose(loads, hits, most_hit) == (min(costs)[2] if costs else None)
