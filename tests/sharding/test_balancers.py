"""Assignment of requests to data-parallel shards: small cases by hand, and general properties."""

import itertools

import numpy as np
import pytest

from sharding import UNASSIGNED, assign_by_count, assign_decode, assign_prefill


def prefill(tokens, loads, capacities):
    return assign_prefill(tokens, loads, capacities).tolist()


def test_prefill_by_hand():
    """9 goes to shard 0, 8 to 1, 5 to 1 (then 13), 4 to 0 (then 13), and 2 to 0, the lower
    shard."""
    assert prefill([5, 9, 2, 8, 4], [0, 0], [100, 100]) == [1, 0, 0, 1, 0]


def test_prefill_counts_current_loads():
    assert prefill([5, 3], [4, 0], [100, 100]) == [1, 0]


def test_the_largest_goes_first_whatever_the_order():
    assert prefill([1, 1, 10], [0, 0], [10, 10]) == [1, 1, 0]


def test_ties_go_to_the_shard_with_fewer_requests():
    """Both shards have load 4 after 4, 2 and 2; the next goes to the shard with one request."""
    assert prefill([2, 2, 4, 1], [0, 0], [9, 9]) == [1, 1, 0, 0]
    assert assign_decode([1], [5, 5], [9, 9], [3, 2], [8, 8]).tolist() == [1]
    assert assign_decode([1], [5, 5], [9, 9], [2, 2], [8, 8]).tolist() == [0]


def test_equal_requests_are_assigned_in_order():
    assert prefill([3, 3, 3], [0, 0, 0], [3, 3, 3]) == [0, 1, 2]


def test_a_request_without_room_is_unassigned_and_smaller_ones_are_not():
    assert prefill([6, 5, 2, 1], [4, 7], [10, 10]) == [0, UNASSIGNED, 1, 1]


def test_a_shard_at_its_capacity_gets_nothing_but_empty_requests():
    assert prefill([1, 0], [5, 9], [5, 9]) == [UNASSIGNED, 0]


def test_decode_goes_where_the_cache_is_least_used():
    """The chosen shard has more requests."""
    assert assign_decode([2], [10, 4], [20, 20], [1, 6], [8, 8]).tolist() == [1]


def test_decode_needs_a_batch_slot_and_cache():
    """Shard 0 has no slot left and shard 1 no cache; shard 2 has one slot for two requests."""
    rooms = {"max_cache": [20, 20, 90], "max_requests": [4, 4, 4]}
    got = assign_decode([6, 7], [0, 15, 50], shard_requests=[4, 0, 3], **rooms)
    assert got.tolist() == [UNASSIGNED, 2]


def test_by_count():
    assert assign_by_count(5, [2, 0, 1], [9, 9, 9]).tolist() == [1, 1, 2, 0, 1]
    assert assign_by_count(4, [1, 0], [2, 2]).tolist() == [1, 0, 1, UNASSIGNED]
    assert assign_by_count(0, [1, 0], [2, 2]).tolist() == []


def random_decode(rng):
    R, S = int(rng.integers(0, 30)), int(rng.integers(1, 6))
    max_cache, max_requests = rng.integers(20, 60, S), rng.integers(1, 8, S)
    return {
        "cache": rng.integers(0, 20, R),
        "shard_cache": rng.integers(0, max_cache + 1),
        "max_cache": max_cache,
        "shard_requests": rng.integers(0, max_requests + 1),
        "max_requests": max_requests,
    }


def test_capacities_are_respected_and_used():
    rng = np.random.default_rng(0)
    unassigned = 0
    for _ in range(300):
        given = random_decode(rng)
        before = {name: values.copy() for name, values in given.items()}
        shards = assign_decode(**given)
        assert shards.dtype == np.int32
        for name, values in given.items():
            np.testing.assert_array_equal(values, before[name])
        np.testing.assert_array_equal(assign_decode(**given), shards)

        cache, requests = given["shard_cache"], given["shard_requests"]
        for shard in range(len(cache)):
            cache[shard] += given["cache"][shards == shard].sum()
            requests[shard] += (shards == shard).sum()
        assert (cache <= given["max_cache"]).all()
        assert (requests <= given["max_requests"]).all()
        for size in given["cache"][shards == UNASSIGNED]:
            unassigned += 1
            assert not (
                (cache + size <= given["max_cache"]) & (requests < given["max_requests"])
            ).any()
    assert unassigned > 100


def test_maximum_load_is_within_a_third_of_the_optimum():
    """Graham's bound for longest-first: 4/3 - 1/(3S) of the optimum, found by exhaustive search."""
    rng = np.random.default_rng(1)
    for _ in range(25):
        R, S = int(rng.integers(1, 7)), int(rng.integers(2, 4))
        tokens = rng.integers(1, 50, R)
        shards = assign_prefill(tokens, [0] * S, [1000] * S)
        got = np.bincount(shards, tokens, S).max()
        optimum = min(
            np.bincount(assignment, tokens, S).max()
            for assignment in itertools.product(range(S), repeat=R)
        )
        assert optimum <= got <= optimum * (4 / 3 - 1 / (3 * S)) + 1e-9


def test_counts_differ_by_at_most_one():
    rng = np.random.default_rng(2)
    for _ in range(50):
        requests = rng.integers(0, 10, 5)
        enough = int((requests.max() - requests).sum())
        shards = assign_by_count(enough + int(rng.integers(0, 20)), requests, [100] * 5)
        after = requests + np.bincount(shards, minlength=5)
        assert after.max() - after.min() <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache": [[1]]}, r"cache: expected one dimension, got shape \(1, 1\)"),
        ({"cache": [1.5]}, "cache: expected integers, got float64"),
        ({"cache": [3, -1]}, "cache: expected 0 or more, got -1"),
        ({"max_cache": [9]}, "max_cache: expected 2 shards as shard_cache, got 1"),
        ({"shard_cache": [1, 10]}, "shard_cache: expected at most 9 on shard 1, got 10"),
        ({"shard_cache": np.array(3)}, r"shard_cache: expected one dimension, got shape \(\)"),
        ({"max_requests": [4, 0]}, "shard_requests: expected at most 0 on shard 1, got 1"),
        (
            {"shard_requests": [1], "max_requests": [4]},
            "shard_requests: expected 2 shards as shard_cache, got 1",
        ),
        (
            {"cache": [9, 10]},
            "cache: expected at most 9, the capacity of an empty shard, got 10 for request 1",
        ),
        (
            {"max_cache": [9, 12], "shard_requests": [1, 0], "max_requests": [4, 0], "cache": [10]},
            "cache: expected at most 9, the capacity of an empty shard, got 10 for request 0",
        ),
    ],
)
def test_refusals(change, message):
    arguments = {"cache": [2, 3], "shard_cache": [1, 1], "max_cache": [9, 9]}
    arguments |= {"shard_requests": [1, 1], "max_requests": [4, 4], **change}
    with pytest.raises(ValueError, match=rf"\A{message}\Z"):
        assign_decode(**arguments)


def test_refusals_of_the_others():
    with pytest.raises(ValueError, match=r"\Atokens: expected at most 9, .* got 11 for request 0"):
        assign_prefill([11], [0], [9])
    with pytest.raises(ValueError, match=r"\Amax_tokens: expected 1 shards as shard_tokens, got 2"):
        assign_prefill([1], [0], [9, 9])
    with pytest.raises(ValueError, match=r"\Anum_requests: expected 0 or more, got -1\Z"):
        assign_by_count(-1, [0], [9])
    with pytest.raises(ValueError, match=r"\Anum_requests: expected at most 0, .* for request 0\Z"):
        assign_by_count(1, [0], [0])
