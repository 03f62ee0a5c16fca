"""Comparison of results with float64: one error metric and one table of tolerances.

Expected values are computed in float64 from the operation's inputs, after these were rounded to
their dtype. So a tolerance covers only the roundings inside the operation.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
from jax.extend.core import Jaxpr, jaxprs_in_params

Array = npt.NDArray[np.float64]

# Largest relative rounding error: half the distance between neighbouring values, relative to their
# magnitude. float32 has 24 significant bits, bfloat16 8, float8_e4m3fn 4.
FLOAT32_ROUNDING, BFLOAT16_ROUNDING, E4M3_ROUNDING = 2.0**-24, 2.0**-8, 2.0**-4
# Below 2^-6, neighbouring float8_e4m3fn values differ by 2^-9 whatever their magnitude.
E4M3_LEAST_ERROR = 2.0**-10

TOLERANCES = {
    # Sums of a few hundred float32 products in any order, and an exponential: tens of roundings of
    # random sign. The largest measured error was 8e-7.
    "float32": 64 * FLOAT32_ROUNDING,
    # Two roundings to bfloat16, of a factor (probabilities, dequantised weights) and of the result.
    # The largest measured error was 5e-3.
    "bfloat16": 2 * BFLOAT16_ROUNDING,
    # Scores near 500 have absolute errors of 500 roundings of 1, which the exponential turns into
    # relative errors.
    "large scores": 512 * FLOAT32_ROUNDING,
}


def tolerance(dtype: npt.DTypeLike) -> float:
    return TOLERANCES[jnp.dtype(dtype).name]


def relative_error(got: npt.ArrayLike, want: npt.ArrayLike) -> float:
    """Returns the largest |got - want| / |want| over rows (the last axis), in Euclidean norms.

    The maximum over rows is used because a single wrong row would hardly change the norm of all.
    Infinities must be at the same positions and are then ignored. A row of zeros must be exactly
    zero.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"expected shape {want.shape}, got {got.shape}"
    assert np.isfinite(want[~np.isinf(want)]).all(), "the expected values contain NaN"
    infinite = np.isinf(want)
    if not np.array_equal(got[infinite], want[infinite]):
        return np.inf
    difference = np.linalg.norm(np.where(infinite, 0, got) - np.where(infinite, 0, want), axis=-1)
    size = np.linalg.norm(np.where(infinite, 0, want), axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(difference == 0, 0, difference / size)
    return float(np.max(error, initial=0))


def check(got: npt.ArrayLike, want: npt.ArrayLike, bound: float) -> None:
    """Asserts that :func:`relative_error` is at most ``bound``."""
    error = relative_error(got, want)
    assert error <= bound, f"relative error {error:.3g} above {bound:.3g}"


def check_slope(
    gradient: npt.ArrayLike, direction: Array, slope: float, bound: float = TOLERANCES["float32"]
) -> None:
    """Asserts that the derivative along ``direction`` is ``slope``, to ``bound`` of the norms."""
    gradient = np.asarray(gradient, np.float64)
    size = np.linalg.norm(gradient) * np.linalg.norm(direction)
    error = abs(np.sum(gradient * direction) - slope) / size
    assert error <= bound, f"slope: relative error {error:.3g} above {bound:.3g}"


def central_difference(f: Callable[[Array], float], x: Array, direction: Array) -> float:
    """Returns the derivative along ``direction``. Its error is about 1e-10 of f's magnitude."""
    step = 1e-5
    return (f(x + step * direction) - f(x - step * direction)) / (2 * step)


def rounded(x: npt.ArrayLike, dtype: npt.DTypeLike) -> Array:
    """Rounds x to ``dtype`` and returns it in float64."""
    return np.asarray(x).astype(_numpy(dtype)).astype(np.float64)


def device(x: npt.ArrayLike, dtype: npt.DTypeLike) -> jax.Array:
    """Returns a device array. Unlike jnp.asarray, device_put compiles no program per shape."""
    return jax.device_put(np.asarray(x).astype(_numpy(dtype)))


def random_e4m3(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray:
    """Returns random float8_e4m3fn of both signs and all exponents, with subnormals and zeros."""
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 6, shape)).astype(
        ml_dtypes.float8_e4m3fn
    )


def largest_intermediate(jaxpr: Jaxpr) -> int:
    """Returns the number of values of the largest array that a program computes."""
    sizes = [math.prod(x.aval.shape) for equation in jaxpr.eqns for x in equation.outvars]
    for equation in jaxpr.eqns:
        sizes += map(largest_intermediate, jaxprs_in_params(equation.params))
    return max(sizes, default=0)


def pack_int4(values: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """Packs [..., K] of -8 to 7 to bytes [..., K / 2], with the even columns in the low halves."""
    values = np.asarray(values, np.int64) % 16
    return (values[..., ::2] + 16 * values[..., 1::2]).astype(np.uint8)


def unpack_int4(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """Inverts :func:`pack_int4`."""
    halves = np.stack([packed % 16, packed // 16], axis=-1).astype(np.int8)
    return np.where(halves < 8, halves, halves - 16).reshape(*packed.shape[:-1], -1)


def spread(scale: npt.ArrayLike, block: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """Repeats each scale over its block of a [..., N, K] array. The last blocks may be partial."""
    N, K = shape[-2:]
    row, column = np.arange(N) // block[0], np.arange(K) // block[1]
    return np.asarray(scale, np.float64)[..., row[:, None], column]


def _numpy(dtype: npt.DTypeLike) -> np.dtype:
    return np.dtype(jnp.dtype(dtype))


def is_dense(array: jax.Array, shape: tuple[int, ...]) -> bool:
    """Returns whether an array has the shape of matrices, and more bytes per value than their
    quantised form."""
    return array.shape == shape and array.dtype.itemsize > 1
