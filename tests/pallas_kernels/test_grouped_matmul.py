"""Tests of grouped_matmul's back-ends through the public function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import batched
from tests.pallas_kernels.grouped_matmul_cases import (
    FLOAT8,
    ROWS_OF_GROUPS,
    GroupedMatmulCases,
    GroupedMatmulGradientCases,
    Inputs,
    compiled,
    run,
)
from tests.pallas_kernels.numerics import BFLOAT16_ROUNDING, TOLERANCES, check_slope


class TestReference(GroupedMatmulCases, GroupedMatmulGradientCases):
    implementation = "reference"


class TestCpu(GroupedMatmulCases, GroupedMatmulGradientCases):
    implementation = "cpu"

    def test_other_platforms_are_refused(self, monkeypatch):
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
        x = Inputs.random((3, 4))
        with pytest.raises(NotImplementedError, match="cpu: runs on CPUs, this is tpu"):
            grouped_matmul(*x.arrays(), implementation="cpu")

    @pytest.mark.parametrize("sizes", [(3, 0, 40), (0, 2, 0)])
    def test_gradients_equal_the_reference_s(self, sizes):
        """They are equal bit for bit, because the reference computes them."""
        x = Inputs.random(sizes, N=40, K=72, lhs_dtype="bfloat16", rhs_dtype=FLOAT8)
        got = self.gradients(x, (0, 4))
        want = TestReference().gradients(x, (0, 4))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.float32(a), np.float32(b))

    def test_gradients_against_differences_of_itself(self):
        """The matmul is linear in each operand, so a difference over any step is its slope."""
        x = Inputs.random((2, 0, 5))
        matmul = compiled("cpu", x.block_shape)
        weights = np.random.default_rng(3).standard_normal((7, 16))
        arrays = x.arrays()
        for i, gradient in enumerate(self.gradients(x, (0, 1))):
            direction = np.random.default_rng(i).standard_normal(arrays[i].shape)
            ends = [
                matmul(*arrays[:i], arrays[i] + sign * jnp.float32(direction), *arrays[i + 1 :])
                for sign in (1, -1)
            ]
            slope = np.sum((np.float64(ends[0]) - np.float64(ends[1])) * weights) / 2
            check_slope(gradient, direction, slope)


@pytest.mark.slow
class TestBatched(GroupedMatmulCases, GroupedMatmulGradientCases):
    implementation = "batched"

    @pytest.fixture(autouse=True)
    def _accept_few_rows(self, monkeypatch):
        monkeypatch.setattr(batched, "_MIN_ROWS", 1)

    @pytest.mark.parametrize(
        "sizes", [(100, 0, 3, 61), (64, 64, 0, 64), (0, 0, 0, 40), (9, 1, 1, 1)]
    )
    def test_blocks_of_many_rows(self, sizes):
        """Blocks of 16, 16, 4 and 1 rows. Some groups fill theirs completely."""
        x = Inputs.random(sizes, M=sum(sizes) + 11)
        self.check(x)
        self.check_gradients(x)


class TestBatchedRefuses:
    def test_few_rows(self):
        x = Inputs.random((20, 20, 20))
        with pytest.raises(NotImplementedError, match="32 rows a group and more, got 60 for 3"):
            grouped_matmul(*x.arrays(), implementation="batched")

    def test_many_copies(self, monkeypatch):
        monkeypatch.setattr(batched, "_MAX_COPIES", 4 * 16 * 24 * 5)
        x = Inputs.random((40, 24))
        with pytest.raises(NotImplementedError, match="would copy 9216 bytes"):
            grouped_matmul(*x.arrays(), implementation="batched")


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("sizes", ROWS_OF_GROUPS)
def test_float8_rows_are_rounded_once(implementation, sizes):
    """Only the result is rounded to bfloat16. A float8 value times its scale has more bits."""
    x = Inputs.random(sizes, N=40, K=72, lhs_dtype=FLOAT8, rhs_dtype=FLOAT8, block_shape=(32, 64))
    got, want = np.float64(run(x, implementation)), x.expected()
    sums = np.linalg.norm(want, axis=-1, keepdims=True) * TOLERANCES["float32"]
    assert (np.abs(got - want) <= BFLOAT16_ROUNDING * np.abs(want) + sums).all()


@pytest.mark.parametrize(("platform", "chosen"), [("cpu", "cpu"), ("gpu", "reference")])
def test_default(monkeypatch, platform, chosen):
    """The default equals the platform's back-end, bit for bit."""
    x = Inputs.random((3, 4, 2), rhs_dtype=FLOAT8)
    want = run(x, chosen)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    # A new function, because jit would reuse the trace of grouped_matmul for the other platform.
    got = jax.jit(functools.partial(grouped_matmul))(*x.arrays())
    np.testing.assert_array_equal(got, want)
