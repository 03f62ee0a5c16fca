"""merge_attention, compared with the formula in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import merge_attention
from tests.pallas_kernels.numerics import TOLERANCES, check, device, rounded, tolerance

SHAPE = (2, 3, 4, 8)


def partial_results(*blind: str, dtype="float32", size: float = 1.0):
    """Yields two attention results. Those named in ``blind`` saw no key."""
    rng = np.random.default_rng(0)
    for name in "ab":
        out, lse = rng.standard_normal(SHAPE), size * rng.standard_normal(SHAPE[:-1])
        if name in blind:
            out, lse = np.zeros(SHAPE), np.full(SHAPE[:-1], -np.inf)
        yield rounded(out, dtype), rounded(lse, "float32")


def merge(a, b, dtype="float32"):
    return jax.jit(merge_attention)(
        device(a[0], dtype), device(a[1], "float32"), device(b[0], dtype), device(b[1], "float32")
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_the_log_sum_exps(dtype):
    a, b = partial_results(dtype=dtype)
    out, lse = merge(a, b, dtype)
    weights = np.exp(a[1]), np.exp(b[1])
    total = weights[0] + weights[1]
    want = (weights[0][..., None] * a[0] + weights[1][..., None] * b[0]) / total[..., None]
    assert out.dtype == dtype
    assert lse.dtype == jnp.float32
    check(out, want, tolerance(dtype))
    check(np.ravel(lse), np.ravel(np.log(total)), TOLERANCES["float32"])


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["left", "right"])
def test_result_without_keys_has_no_weight(order):
    visible, blind = partial_results("b")
    out, lse = merge(*(visible, blind)[order])
    check(out, visible[0], TOLERANCES["float32"])
    np.testing.assert_array_equal(lse, np.float32(visible[1]))


def test_two_results_without_keys():
    out, lse = merge(*partial_results("a", "b"))
    np.testing.assert_array_equal(out, np.zeros(SHAPE))
    np.testing.assert_array_equal(lse, np.full(SHAPE[:-1], -np.inf))


def test_some_queries_without_keys():
    """Queries of one call may or may not have keys, independently of each other."""
    a, b = partial_results()
    none, _ = partial_results("a", "b")
    is_first_sequence = np.arange(SHAPE[0])[:, None, None] == 0
    mixed = (
        np.where(is_first_sequence[..., None], none[0], b[0]),
        np.where(is_first_sequence, none[1], b[1]),
    )
    out, lse = merge(a, mixed)
    whole_out, whole_lse = merge(a, b)
    check(out[0], a[0][0], TOLERANCES["float32"])
    np.testing.assert_array_equal(out[1], whole_out[1])
    np.testing.assert_array_equal(lse[1], whole_lse[1])


def test_large_log_sum_exps():
    """Log-sum-exps are in the hundreds, so their exponentials overflow float32."""
    a, b = partial_results(size=300.0)
    out, lse = merge(a, b)
    want = np.logaddexp(a[1], b[1])
    assert np.abs(want).max() > 400
    check(np.ravel(lse), np.ravel(want), TOLERANCES["float32"])
    want_out = a[0] * np.exp(a[1] - want)[..., None] + b[0] * np.exp(b[1] - want)[..., None]
    check(out, want_out, TOLERANCES["large scores"])


def test_order_does_not_matter():
    a, b = partial_results()
    for got, want in zip(merge(a, b), merge(b, a), strict=True):
        check(got, want, TOLERANCES["float32"])
