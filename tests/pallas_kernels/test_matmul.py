"""Matmuls of float32 by bfloat16 matmuls."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import float32_matmul

RANDOM = np.random.default_rng(0)


def matrix(rows, columns, dtype):
    # The magnitudes differ much, so that small parts count.
    values = RANDOM.normal(size=(rows, columns)) * 2.0 ** RANDOM.integers(-12, 12, (rows, columns))
    return jnp.asarray(values, dtype)


@pytest.mark.parametrize("contracted", [(1, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "float32")])
def test_as_precise_as_float32(dtypes, contracted):
    shapes = [(24, 96) if axis else (96, 24) for axis in contracted]
    a, b = (matrix(*shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    x, y = (
        np.asarray(each, np.float64) if axis else np.asarray(each, np.float64).T
        for each, axis in zip((a, b), contracted, strict=True)
    )
    got = float32_matmul(a, b, contracted=contracted)
    assert got.dtype == jnp.float32
    # A matmul of the CPU in float32 is off by up to 2^-21.7, and one in bfloat16 by 2^-8.
    assert np.all(np.abs(got - x @ y.T) <= 2.0**-20 * (np.abs(x) @ np.abs(y).T))


def test_two_bfloat16_are_multiplied_once():
    a, b = matrix(8, 16, "bfloat16"), matrix(4, 16, "bfloat16")
    want = jnp.einsum("mk,nk->mn", a, b, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(float32_matmul(a, b), want)
