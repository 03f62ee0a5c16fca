"""Test cases that every back-end of top_k must pass; see TopKCases."""

import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import numpy as np
import pytest

from pallas_kernels import top_k
from pallas_kernels.dispatch import Implementation


def expected(scores: np.ndarray, k: int) -> np.ndarray:
    """Chooses one score after the other."""
    out = np.full((*scores.shape[:-1], k), -1)
    for row in np.ndindex(*scores.shape[:-1]):
        candidates = [i for i, score in enumerate(scores[row]) if score > -np.inf]
        chosen = sorted(candidates, key=lambda i: (-scores[row][i], i))[:k]
        out[row][: len(chosen)] = sorted(chosen)
    return out


Operation = Implementation | Callable[..., jax.Array]
"""An ``implementation`` argument of top_k, or a back-end's function."""


@functools.cache
def compiled(implementation: Operation, k: int) -> Callable[..., jax.Array]:
    if callable(implementation):
        return jax.jit(functools.partial(implementation, k=k))
    return jax.jit(functools.partial(top_k, k=k, implementation=implementation))


class TopKCases:
    """Each back-end subclasses this and sets ``implementation``."""

    implementation: ClassVar[Operation]

    def check(self, scores: np.ndarray, k: int, lengths: np.ndarray | None = None) -> np.ndarray:
        scores = scores.astype(np.float32)
        options = {} if lengths is None else {"lengths": lengths}
        got = np.asarray(compiled(self.implementation, k)(scores, **options))
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, expected(scores, k))
        return got

    @pytest.mark.parametrize("k", [1, 7, 40, 60])
    def test_random_scores_with_hidden_tokens(self, k):
        """Rows have from 0 to all 40 finite scores."""
        rng = np.random.default_rng(0)
        scores = rng.standard_normal((2, 3, 40))
        hidden = np.array([[0, 39, 40], [1, 20, 35]])[..., None]
        self.check(np.where(np.arange(40) < hidden, scores, -np.inf), k)

    def test_ties_go_to_the_lower_index(self):
        scores = np.random.default_rng(1).integers(-2, 3, (4, 64)).astype(float)
        self.check(scores, 20)

    def test_negative_zero_ties_with_zero(self):
        scores = np.zeros((1, 16))
        scores[0, ::3] = -0.0
        got = self.check(scores, 6)
        assert got.tolist() == [[0, 1, 2, 3, 4, 5]]

    def test_magnitudes_of_both_signs(self):
        """Radix selection orders bit patterns: exponents far apart, both signs, subnormals."""
        rng = np.random.default_rng(2)
        scores = rng.standard_normal((3, 200)) * 10.0 ** rng.integers(-44, 38, (3, 200))
        self.check(scores, 77)

    def test_lengths(self):
        """Rows of no score, less than a chunk, whole chunks, and all; fewer scores than k."""
        rng = np.random.default_rng(6)
        lengths = np.array([[0, 1, 600], [1024, 1025, 1600]], np.int32)
        scores = rng.standard_normal((2, 3, 1600))
        scores = np.where(np.arange(1600) < lengths[..., None], scores, -np.inf)
        self.check(scores, 700, lengths)

    def test_published_k(self):
        self.check(np.random.default_rng(3).standard_normal((1, 5000)), 2048)
