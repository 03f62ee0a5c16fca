"""Values that no checkpoint has unless it is damaged."""

from __future__ import annotations

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

from dsv3_jax.checkpoint.arrays import LazyArray

# dtype -> the integer of its width, and the bits that are all set in NaN and infinity (float8 has
# no infinity, and NaN alone sets all seven).
_EXPONENTS: dict[np.dtype, tuple[type, int]] = {
    np.dtype(float8_e4m3fn): (np.uint8, 0x7F),
    np.dtype(bfloat16): (np.uint16, 0x7F80),
    np.dtype(np.float16): (np.uint16, 0x7C00),
    np.dtype(np.float32): (np.uint32, 0x7F800000),
}
_CACHED = 2**17  # elements looked at together: they stay in the CPU's cache


def check_finite(name: str, values: np.ndarray) -> None:
    """Refuses NaN and infinity, by the tensor's name; integers have neither."""
    if values.dtype not in _EXPONENTS:
        return
    integer, mask = _EXPONENTS[values.dtype]
    bits = np.ascontiguousarray(values).reshape(-1).view(integer)
    for first in range(0, bits.size, _CACHED):
        if ((bits[first : first + _CACHED] & integer(mask)) == mask).any():
            flat = values.reshape(-1)[first : first + _CACHED].astype(np.float32)
            bad = flat[~np.isfinite(flat)][0]
            raise ValueError(f"{name}: expected finite values, got {bad}")


def check_scale(
    name: str,
    scale: np.ndarray,
    weight: LazyArray,
    block: tuple[int, int],
    first: tuple[int, int] = (0, 0),
) -> None:
    """Refuses scales that are NaN, infinite or negative, and zero but over a block of zeros.

    Args:
      scale: of all blocks of ``weight``, or of some from block ``first`` on.
      weight: is read where a scale is zero, and only there.
    """
    values = scale.astype(np.float32)
    sound = np.isfinite(values) & (values >= 0)
    if not sound.all():
        raise ValueError(
            f"{name}: expected scales that are finite and not negative, got {values[~sound][0]}"
        )
    packed = 2 if weight.dtype == np.uint8 else 1  # columns an element
    width = -(-block[1] // packed)
    for i, j in np.argwhere(values == 0):
        row, column = first[0] + int(i), first[1] + int(j)
        rows = slice(row * block[0], (row + 1) * block[0])
        under = weight[rows, column * width : (column + 1) * width]
        if under.astype(np.float32).any():
            raise ValueError(
                f"{name}: expected scales above 0 over weights that are not 0, "
                f"got 0 for block {row}, {column}"
            )
