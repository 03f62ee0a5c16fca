"""Tests of the error metric."""

import numpy as np
import pytest

from tests.pallas_kernels.numerics import check, relative_error


def test_it_is_the_largest_relative_error_of_a_row():
    want = np.array([[3.0, 4.0], [300.0, 400.0], [0.0, 0.0]])
    assert relative_error(want, want) == 0
    one, two = want.copy(), want.copy()
    one[1, 1] = two[1, 1] = 405
    two[0, 1] = 5
    assert relative_error(one, want) == pytest.approx(0.01)
    assert relative_error(two, want) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        ([1.0, np.nan], [1.0, 2.0]),
        ([1.0, np.inf], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, -np.inf]),
        ([1.0, np.inf], [1.0, -np.inf]),
        ([1.0, np.nan], [1.0, -np.inf]),
        ([0.0, 1e-30], [0.0, 0.0]),
        ([1.0], [1.0, 1.0]),
        ([np.nan], [np.nan]),
    ],
)
def test_refuses(got, want):
    with pytest.raises(AssertionError):
        check(got, want, 1e6)


def test_infinities_at_the_same_positions_are_ignored():
    check([1.0, -np.inf, np.inf], [1.0, -np.inf, np.inf], 0.0)
