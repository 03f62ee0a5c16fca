"""How these tests compare numbers: one error metric, and one table of what an operation may lose.

Expected values are sums in float64 over the very inputs that the operation gets, after those were
rounded to their dtype. A bound therefore covers the operation's own roundings and nothing else.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# Half the distance between neighbours over their magnitude, at most: float32 keeps 24 bits,
# bfloat16 8, float8_e4m3fn 4.
FLOAT32_ROUNDING, BFLOAT16_ROUNDING, E4M3_ROUNDING = 2.0**-24, 2.0**-8, 2.0**-4
# Below 2^-6 float8_e4m3fn's neighbours stand 2^-9 apart, whatever the magnitude.
E4M3_LEAST_ERROR = 2.0**-10

TOLERANCES = {
    # A few hundred float32 products a sum, in any order, and an exponential: tens of roundings of
    # random sign, of which 8e-7 remained at most.
    "float32": 64 * FLOAT32_ROUNDING,
    # Two roundings to bfloat16, one of a factor (probabilities, dequantised weights) and one of the
    # result; 5e-3 remained at most.
    "bfloat16": 2 * BFLOAT16_ROUNDING,
    # Scores near 500 are off by 500 roundings of 1, and the exponential makes relative errors of
    # them.
    "large scores": 512 * FLOAT32_ROUNDING,
}


def tolerance(dtype: npt.DTypeLike) -> float:
    return TOLERANCES[jnp.dtype(dtype).name]


def relative_error(got: npt.ArrayLike, want: npt.ArrayLike) -> float:
    """Largest |got - want| / |want| over the rows of the last axis: Euclidean norms in float64.

    Infinities must stand in the same places and then count for nothing; a row of zeros must be
    exactly zero. By rows, for one wrong row among many would hardly move the norm of all.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"expected shape {want.shape}, got {got.shape}"
    assert np.isfinite(want[~np.isinf(want)]).all(), "the expected values hold a NaN"
    infinite = np.isinf(want)
    if not np.array_equal(got[infinite], want[infinite]):
        return np.inf
    difference = np.linalg.norm(np.where(infinite, 0, got) - np.where(infinite, 0, want), axis=-1)
    size = np.linalg.norm(np.where(infinite, 0, want), axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(difference == 0, 0, difference / size)
    return float(np.max(error, initial=0))


def check(got: npt.ArrayLike, want: npt.ArrayLike, bound: float) -> None:
    error = relative_error(got, want)
    assert error <= bound, f"relative error {error:.3g} above {bound:.3g}"


def check_slope(
    gradient: npt.ArrayLike, direction: Array, slope: float, bound: float = TOLERANCES["float32"]
) -> None:
    """The gradient's part along ``direction`` is ``slope``, to within ``bound`` of their norms."""
    gradient = np.asarray(gradient, np.float64)
    size = np.linalg.norm(gradient) * np.linalg.norm(direction)
    error = abs(np.sum(gradient * direction) - slope) / size
    assert error <= bound, f"slope: relative error {error:.3g} above {bound:.3g}"


def central_difference(f: Callable[[Array], float], x: Array, direction: Array) -> float:
    """Slope of a float64 function; its own error is about 1e-10 of the function's size."""
    step = 1e-5
    return (f(x + step * direction) - f(x - step * direction)) / (2 * step)


def rounded(x: npt.ArrayLike, dtype: npt.DTypeLike) -> Array:
    """x as ``dtype`` holds it, in float64."""
    return np.asarray(x).astype(_numpy(dtype)).astype(np.float64)


def device(x: npt.ArrayLike, dtype: npt.DTypeLike) -> jax.Array:
    """By device_put, for jnp.asarray compiles a program for every shape."""
    return jax.device_put(np.asarray(x).astype(_numpy(dtype)))


def random_e4m3(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray:
    """float8_e4m3fn of both signs and every magnitude class, subnormals and zero included."""
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 6, shape)).astype(
        ml_dtypes.float8_e4m3fn
    )


def pack_int4(values: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """[..., K] of -8 to 7, two to a byte [..., K / 2]: the even column is the byte modulo 16."""
    values = np.asarray(values, np.int64) % 16
    return (values[..., ::2] + 16 * values[..., 1::2]).astype(np.uint8)


def unpack_int4(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    halves = np.stack([packed % 16, packed // 16], axis=-1).astype(np.int8)
    return np.where(halves < 8, halves, halves - 16).reshape(*packed.shape[:-1], -1)


def spread(scale: npt.ArrayLike, block: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """Each scale over its block of a [..., N, K] array, whose last blocks may be partial."""
    N, K = shape[-2:]
    row, column = np.arange(N) // block[0], np.arange(K) // block[1]
    return np.asarray(scale, np.float64)[..., row[:, None], column]


def _numpy(dtype: npt.DTypeLike) -> np.dtype:
    return np.dtype(jnp.dtype(dtype))
