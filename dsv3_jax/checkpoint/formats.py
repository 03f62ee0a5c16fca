"""Quantization and dequantization of matrices in NumPy, and checks of stored values and scales.

Stored forms are float8 with block scales, integers with one scale per row or group, and plain
floats. A dequantized value is the exact product of the stored number and its scale, rounded once to
the requested dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

from dsv3_jax.checkpoint.arrays import LazyArray, columns_per_element
from dsv3_jax.quantization import BlockQuantization, IntegerQuantization, Quantization

# dtype -> unsigned integer of the same width, and the bits that are all set in NaN and infinity.
# float8_e4m3fn has no infinity, and only its NaN has all seven bits set.
_EXPONENTS: dict[np.dtype, tuple[type, int]] = {
    np.dtype(float8_e4m3fn): (np.uint8, 0x7F),
    np.dtype(bfloat16): (np.uint16, 0x7F80),
    np.dtype(np.float16): (np.uint16, 0x7C00),
    np.dtype(np.float32): (np.uint32, 0x7F800000),
}
_CACHED_ELEMENTS = 2**17  # tested at once, so that they stay in the CPU's cache

_FLOAT8 = np.dtype(float8_e4m3fn)
_FLOAT8_VALUES = np.arange(256, dtype=np.uint8).view(_FLOAT8).astype(np.float64)
_FLOAT8_MAX = 448.0
_SMALLEST_AMAX = 1e-4  # as in DeepSeek's act_quant
_TILE_ROWS = 64  # processed at once, so that temporaries stay in the CPU's cache


def dequantize(
    values: np.ndarray,
    scale: np.ndarray,
    block: tuple[int, int],
    dtype: np.dtype,
    offset: tuple[int, int] = (0, 0),
) -> np.ndarray:
    """Returns ``values * scale`` in ``dtype``, with each product rounded once.

    Args:
      values: matrix or part of one: float8 or int8 [N, K], or packed int4 as uint8 [N, K/2].
      scale: scales of all blocks of ``block`` rows and columns that ``values`` overlaps.
      offset: row and column of ``values[0, 0]`` within the first of these blocks.
    """
    if values.dtype == np.uint8:
        values = unpack_int4(values)
    N, K = values.shape
    rows = (np.arange(N) + offset[0]) // block[0]
    columns = (np.arange(K) + offset[1]) // block[1]
    wide = scale.astype(np.float64)
    out = np.empty((N, K), dtype)
    if values.dtype == _FLOAT8:
        _dequantize_float8(values.view(np.uint8), wide, rows, columns, out)
    else:
        for tile in _tiles(N):
            exact = values[tile].astype(np.float64) * wide[np.ix_(rows[tile], columns)]
            out[tile] = _rounded(exact, out.dtype)
    return out


class Recoding(NamedTuple):
    """Conversion of a tensor from one stored form to another."""

    source: Quantization | None  # quantization of the source. None for plain floats.
    target: Quantization | None  # quantization of the result. None for plain floats.
    dtype: np.dtype  # dtype of a result that is not quantized

    @property
    def row_multiple(self) -> int:
        """Number of rows to recode at once: at least 128, and whole blocks of both forms."""
        blocks = [q.block_shape(1)[0] for q in (self.source, self.target) if q is not None]
        rows = math.lcm(*blocks)
        return rows * max(1, 128 // rows)


Observer = Callable[[np.ndarray, np.ndarray, np.ndarray], None]
"""Receives float32 values, the quantized values, and their scales."""


@np.errstate(over="ignore", invalid="ignore")  # callers check the result for infinity
def recode(
    values: np.ndarray,
    scale: np.ndarray | None,
    first: int,
    recoding: Recoding,
    observe: Observer | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Converts rows of a matrix, or a whole tensor of another rank, to another stored form, few
    rows at a time, so that their float32 values stay in the CPU's cache. Returns values and scales;
    the scales are None if the new form is not quantized.

    Args:
      scale: scales of the whole matrix, or None if the source is not quantized.
      first: index of the first row. It must begin a block of both forms.
      observe: called with each quantized part of the matrix.
    """
    source, target, dtype = recoding
    if not values.shape:
        return values.astype(dtype, copy=False), None
    stored, scales = [], []
    for begin in range(0, len(values), recoding.row_multiple):
        tile = values[begin : begin + recoding.row_multiple]
        if scale is not None and source is not None:
            N, K = source.block_shape(tile.shape[1] * columns_per_element(tile.dtype))
            row = first + begin
            tile_scale = scale[row // N : -(-(row + len(tile)) // N)]
            dense_dtype = np.dtype(np.float32) if target is not None else dtype
            tile = dequantize(tile, tile_scale, (N, K), dense_dtype, (row % N, 0))
        if target is None:
            stored.append(tile.astype(dtype, copy=False))
            continue
        dense = tile.astype(np.float32, copy=False)
        quantized, new_scale = quantize(dense, target)
        if observe is not None:
            observe(dense, quantized, new_scale)
        stored.append(quantized)
        scales.append(new_scale)
    return _concatenated(stored), _concatenated(scales) if scales else None


def _concatenated(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _dequantize_float8(
    codes: np.ndarray, scale: np.ndarray, rows: np.ndarray, columns: np.ndarray, out: np.ndarray
) -> None:
    """Fills ``out`` by table look-up. Each row of blocks has a table of 256 values per block."""
    first_entry = (columns * 256).astype(np.int32)
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    for begin, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        table = _rounded(scale[rows[begin], :, None] * _FLOAT8_VALUES, out.dtype).reshape(-1)
        for first in range(begin, end, _TILE_ROWS):
            tile = slice(first, min(first + _TILE_ROWS, end))
            # Indices are in range by construction; "clip" spares NumPy a buffered copy.
            np.take(table, codes[tile] + first_entry, out=out[tile], mode="clip")


def _rounded(exact: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Rounds float64 to nearest even, once. ml_dtypes rounds to bfloat16 by way of float32."""
    if dtype != bfloat16:
        return exact.astype(dtype)
    _, exponent = np.frexp(exact)
    unit = np.ldexp(1.0, np.maximum(exponent, -125) - 8)  # -125: bfloat16's subnormals
    with np.errstate(invalid="ignore"):
        return (np.rint(exact / unit) * unit).astype(np.float32).astype(bfloat16)


def quantize(weight: np.ndarray, quantization: Quantization) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes whole blocks of a float matrix. Returns the stored values and float32 scales.

    * int8: ``scale = amax / 127`` per row or group.
    * int4: ``scale = max(max / 7, -min / 8)`` per row or group, which uses the whole range.
    * float8: ``scale = max(amax, 1e-4) / 448`` per block, rounded up to a power of two for ue8m0.

    Values are ``weight / scale``, rounded to nearest even.
    """
    if isinstance(quantization, BlockQuantization):
        return _quantize_float8(weight, quantization)
    return _quantize_integer(weight, quantization)


def _quantize_float8(
    weight: np.ndarray, quantization: BlockQuantization
) -> tuple[np.ndarray, np.ndarray]:
    N, K = weight.shape
    bn, bk = quantization.weight_block_size
    values = np.empty((N, K), _FLOAT8)
    scales = np.empty((-(-N // bn), -(-K // bk)), np.float32)
    edges = np.arange(0, K, bk)
    for i, first in enumerate(range(0, N, bn)):
        rows = weight[first : first + bn].astype(np.float32)
        amax = np.maximum.reduceat(np.abs(rows).max(axis=0), edges)
        scale = np.maximum(amax, np.float32(_SMALLEST_AMAX)) / np.float32(_FLOAT8_MAX)
        if quantization.scale_fmt == "ue8m0":
            mantissa, exponent = np.frexp(scale)
            scale = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))
        scales[i] = scale
        rows /= scale.repeat(bk)[:K]
        # Clipped because float8_e4m3fn has no infinity: a value past 448 would become NaN.
        values[first : first + bn] = np.clip(rows, -_FLOAT8_MAX, _FLOAT8_MAX, out=rows)
    return values, scales


def _quantize_integer(
    weight: np.ndarray, quantization: IntegerQuantization
) -> tuple[np.ndarray, np.ndarray]:
    N, K = weight.shape
    _, bk = quantization.block_shape(K)
    shape, _ = quantization.stored(N, K)
    values = np.empty(shape, np.uint8 if quantization.bits == 4 else np.int8)
    scales = np.empty((N, -(-K // bk)), np.float32)
    edges = np.arange(0, K, bk)
    for tile in _tiles(N):
        rows = weight[tile].astype(np.float32)
        high = np.maximum.reduceat(rows, edges, axis=1)
        low = np.minimum.reduceat(rows, edges, axis=1)
        if quantization.bits == 8:
            least, most = -127, 127
            scale = np.maximum(high, -low) / np.float32(127)
        else:
            least, most = -8, 7
            scale = np.maximum(high / np.float32(7), low / np.float32(-8))
        scale[scale < np.finfo(np.float32).tiny] = 1  # zero, or flushed to zero
        scales[tile] = scale
        rows /= scale.repeat(bk, axis=1)[:, :K]
        np.clip(np.rint(rows, out=rows), least, most, out=rows)
        values[tile] = rows if quantization.bits == 8 else pack_int4(rows.astype(np.int8))
    return values, scales


def pack_int4(values: np.ndarray) -> np.ndarray:
    """Packs int8 [..., K] of -8..7 into uint8 [..., K/2]; even columns take the low half."""
    nibbles = values.view(np.uint8)
    return (nibbles[..., ::2] & 15) | (nibbles[..., 1::2] << 4)


def unpack_int4(packed: np.ndarray) -> np.ndarray:
    """Unpacks uint8 [..., K/2] to int8 [..., K]. Inverse of :func:`pack_int4`."""
    signed = packed.view(np.int8)
    pairs = np.stack([np.left_shift(signed, 4) >> 4, signed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def _tiles(rows: int) -> list[slice]:
    return [slice(first, min(first + _TILE_ROWS, rows)) for first in range(0, rows, _TILE_ROWS)]


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
    """Refuses scales that are NaN, infinite or negative, or zero for a block that is not zero. They
    are those of consecutive blocks of ``weight``, with ``block`` rows and columns each, beginning
    at block ``first``. ``weight`` is read only where a scale is zero."""
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
