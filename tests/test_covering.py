"""The helper that replaces full products of parameters in tests."""

import itertools

import pytest

from tests.support.covering import covering, covering_set, sampled


@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 1), (2, 3), (3, 3, 3), (5, 2, 1, 4), (2,) * 6])
def test_every_pair_of_values_occurs(sizes):
    cases = covering_set(sizes)
    assert len(set(cases)) == len(cases)
    assert set(cases) <= set(itertools.product(*map(range, sizes)))
    for (a, m), (b, n) in itertools.combinations(enumerate(sizes), 2):
        assert {(case[a], case[b]) for case in cases} == set(itertools.product(range(m), range(n)))
    assert len(sizes) > 1 or len(cases) == sizes[0]


def test_few_cases():
    """The product of two axes is a lower bound; greedy choice needs little more for three or
    more."""
    assert len(covering_set((3, 4))) == 12
    assert len(covering_set((3, 3, 3))) <= 11
    assert len(covering_set((2,) * 6)) <= 8


def test_a_seed_selects_a_sample_in_addition_to_the_covering_set():
    sizes = (3, 3, 3)
    samples = [sampled(sizes, 4, seed) for seed in range(5)]
    assert samples[0] == sampled(sizes, 4, 0)
    assert len(set(map(tuple, samples))) > 1
    for cases in samples:
        assert len(set(cases)) == 4
        assert not set(cases) & set(covering_set(sizes))
    assert len(sampled((2, 2), 4, 0)) == 0


@covering({"a": range(3), "b, c": [(1, 2), (3, 4)], "d": "xyz"}, sample=2, slow_rest=True)
def test_a_parametrized_test(a, b, c, d, request):
    """Each name gets its values; names of sampled cases end with the seed; the rest is slow."""
    assert (a in range(3), (b, c) in ((1, 2), (3, 4)), d in "xyz") == (True, True, True)
    seed = request.config.getoption("--covering-seed")
    name = request.node.callspec.id.removesuffix(f"-seed{seed}")
    assert name == f"{a}-{b}-{c}-{d}"
    case = (a, b // 2, "xyz".index(d))
    was_sampled = name != request.node.callspec.id
    assert was_sampled == (case in sampled((3, 2, 3), 2, seed))
    is_slow = request.node.get_closest_marker("slow") is not None
    assert is_slow == (case not in covering_set((3, 2, 3)) and not was_sampled)
