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


def check_scale(name: str, scale: np.ndarray, weight: LazyArray, block: tuple[int, int]) -> None:
    """Refuses scales that are NaN, infinite or negative, and zero but over a block of zeros."""
    wide = scale.astype(np.float32)
    if (np.isfinite(wide) & (wide > 0)).all():
        return
    for i, j in np.argwhere(~(np.isfinite(wide) & (wide > 0))):
        rows, columns = (slice(k * n, (k + 1) * n) for k, n in zip((i, j), block, strict=True))
        if wide[i, j] != 0 or weight[rows, columns].astype(np.float32).any():
            raise ValueError(
                f"{name}: expected finite and positive scales, got {wide[i, j]} at [{i}, {j}]"
            )
