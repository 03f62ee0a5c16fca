"""Checks for values that only a damaged checkpoint has."""

from __future__ import annotations

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

from dsv3_jax.checkpoint.arrays import LazyArray, columns_per_element

# dtype -> unsigned integer of the same width, and the bits that are all set in NaN and infinity.
# float8_e4m3fn has no infinity, and only its NaN has all seven bits set.
_EXPONENTS: dict[np.dtype, tuple[type, int]] = {
    np.dtype(float8_e4m3fn): (np.uint8, 0x7F),
    np.dtype(bfloat16): (np.uint16, 0x7F80),
    np.dtype(np.float16): (np.uint16, 0x7C00),
    np.dtype(np.float32): (np.uint32, 0x7F800000),
}
_CACHED_ELEMENTS = 2**17  # tested at once, so that they stay in the CPU's cache


def check_finite(name: str, values: np.ndarray) -> None:
    """Refuses NaN and infinity in a tensor called ``name``. Integers pass."""
    if values.dtype not in _EXPONENTS:
        return
    integer, mask = _EXPONENTS[values.dtype]
    bits = np.ascontiguousarray(values).reshape(-1).view(integer)
    for first in range(0, bits.size, _CACHED_ELEMENTS):
        if ((bits[first : first + _CACHED_ELEMENTS] & integer(mask)) == mask).any():
            flat = values.reshape(-1)[first : first + _CACHED_ELEMENTS].astype(np.float32)
            bad = flat[~np.isfinite(flat)][0]
            raise ValueError(f"{name}: expected finite values, got {bad}")


def check_scale(
    name: str,
    scale: np.ndarray,
    weight: LazyArray,
    block: tuple[int, int],
    first: tuple[int, int] = (0, 0),
) -> None:
    """Refuses scales that are NaN, infinite or negative, or zero for a block that is not zero.

    Args:
      scale: scales of consecutive blocks of ``weight``, beginning at block ``first``.
      weight: read only where a scale is zero.
      block: rows and columns per scale.
      first: row and column of ``scale[0, 0]`` among all blocks of ``weight``.
    """
    values = scale.astype(np.float32)
    valid = np.isfinite(values) & (values >= 0)
    if not valid.all():
        raise ValueError(
            f"{name}: expected scales that are finite and not negative, got {values[~valid][0]}"
        )
    width = -(-block[1] // columns_per_element(weight.dtype))
    for i, j in np.argwhere(values == 0):
        row, column = first[0] + int(i), first[1] + int(j)
        rows = slice(row * block[0], (row + 1) * block[0])
        scaled = weight[rows, column * width : (column + 1) * width]
        if scaled.astype(np.float32).any():
            raise ValueError(
                f"{name}: expected scales above 0 over weights that are not 0, "
                f"got 0 for block {row}, {column}"
            )
