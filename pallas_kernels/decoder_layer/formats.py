"""Formats of a model's matrices: floating point, int8, and int4 as two columns in a byte.

Float8 matrices have a float32 scale for each block of 128x128, int8 matrices one for each row, and
int4 matrices one for 128 columns of a row. A dtype identifies its format: int4 is stored as uint8,
the even column in the low half.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_kernels.block_quant.reference import scale_shape

SCALE_BLOCK = 128
"""Columns that share a scale of a float8 or an int4 matrix; also rows of a float8 matrix."""

_INT8, _INT4 = jnp.dtype(jnp.int8), jnp.dtype(jnp.uint8)


def is_integer(dtype: Any) -> bool:
    """Returns whether a dtype is that of int8 or int4 matrices."""
    return jnp.dtype(dtype) in (_INT8, _INT4)


def columns_per_element(dtype: Any) -> int:
    """Returns the number of a matrix' columns in one stored element."""
    return 2 if jnp.dtype(dtype) == _INT4 else 1


def shape_of(matrix: Any) -> tuple[int, ...]:
    """Returns the shape of the numbers of a matrix, or of a stack of them."""
    *rows, stored = matrix.shape
    return (*rows, stored * columns_per_element(matrix.dtype))


def scale_block(matrix: Any) -> tuple[int, int]:
    """Returns the rows and columns that share a scale, of a matrix that has scales."""
    dtype = jnp.dtype(matrix.dtype)
    if dtype == _INT8:
        return 1, shape_of(matrix)[-1]
    return 1 if dtype == _INT4 else SCALE_BLOCK, SCALE_BLOCK


def scales_shape(matrix: Any) -> tuple[int, ...]:
    """Returns the shape of the scales of a matrix, or of a stack of them."""
    return scale_shape(shape_of(matrix), scale_block(matrix))
