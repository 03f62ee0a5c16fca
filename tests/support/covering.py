"""Pairwise covering sets: few test cases instead of the full product of parameters.

``@covering({"dtype": [...], "sizes": [...], "N, K": [(16, 24), ...]})`` parametrizes a test with
cases that contain every pair of values of two axes, and with a random sample of the product. The
seed of the sample is at the end of its cases' names and in pytest's header; ``pytest
--covering-seed N`` selects another sample.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

DEFAULT_SEED = 0


def covering(
    axes: Mapping[str, Sequence[Any]], *, sample: int = 0, slow_rest: bool = False
) -> pytest.MarkDecorator:
    """Parametrizes a test with a covering set of the product of ``axes`` and a random sample.

    Args:
      axes: for each axis, the name of its parameter and the values. An axis of several parameters
        has their names, separated by commas, and a tuple for each value.
      sample: number of cases in addition to the covering set.
      slow_rest: whether to add the rest of the product as slow tests.
    """
    return pytest.mark.covering(axes, sample=sample, slow_rest=slow_rest)


def slow_except(cases: Sequence[Any], quick: Collection[int]) -> list[Any]:
    """Returns parameters for pytest.mark.parametrize; all are slow except the ``quick`` indices."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if index in quick else pytest.mark.slow,
        )
        for index, case in enumerate(cases)
    ]


def generate(metafunc: pytest.Metafunc) -> None:
    """Parametrizes tests under ``covering``; a conftest calls it in pytest_generate_tests."""
    seed = metafunc.config.getoption("--covering-seed") or DEFAULT_SEED
    for mark in metafunc.definition.iter_markers("covering"):
        axes = mark.args[0]
        names = [name.strip() for axis in axes for name in axis.split(",")]
        metafunc.parametrize(names, _parameters(axes, seed, **mark.kwargs))


def covering_set(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns cases as tuples of indices, one per axis. Any two indices of two axes share a case.

    The result depends only on the sizes: the next case is the first of those that cover the most
    uncovered pairs.
    """
    pairs = {case: _pairs(case) for case in itertools.product(*map(range, sizes))}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(pairs, key=lambda case: len(missing & pairs[case]))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


def sampled(sizes: Sequence[int], count: int, seed: int) -> list[tuple[int, ...]]:
    """Returns up to ``count`` cases that are not in the covering set."""
    chosen = set(covering_set(sizes))
    others = [case for case in itertools.product(*map(range, sizes)) if case not in chosen]
    return sorted(random.Random(seed).sample(others, min(count, len(others))))


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    """Returns all pairs of a case's indices with their axes; with one axis, the single index."""
    return set(itertools.combinations(enumerate(case), min(2, len(case))))


def _parameters(
    axes: Mapping[str, Sequence[Any]], seed: int, *, sample: int, slow_rest: bool
) -> list[Any]:
    sizes = [len(values) for values in axes.values()]
    chosen, random_cases = covering_set(sizes), sampled(sizes, sample, seed)
    rest = (
        set(itertools.product(*map(range, sizes))) - {*chosen, *random_cases} if slow_rest else ()
    )
    return [
        *(_parameter(axes, case) for case in chosen),
        *(_parameter(axes, case, ending=f"-seed{seed}") for case in random_cases),
        *(_parameter(axes, case, marks=(pytest.mark.slow,)) for case in sorted(rest)),
    ]


def _parameter(
    axes: Mapping[str, Sequence[Any]],
    case: tuple[int, ...],
    *,
    ending: str = "",
    marks: Sequence[pytest.MarkDecorator] = (),
) -> Any:
    values: list[Any] = []
    for (axis, choices), index in zip(axes.items(), case, strict=True):
        values += choices[index] if "," in axis else [choices[index]]
    name = "-".join(getattr(value, "__name__", None) or str(value) for value in values)
    return pytest.param(*values, id=name + ending, marks=marks)
