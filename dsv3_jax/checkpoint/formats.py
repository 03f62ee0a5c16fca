"""Matrices between their stored forms, in NumPy, a piece at a time.

Float8 with block scales, integers with a scale a row or a group, and plain floats. Values are exact
products of integer or float8 and scale, rounded once to the dtype asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

from dsv3_jax.quantization import BlockQuantization, IntegerQuantization, Quantization

_FLOAT8 = np.dtype(float8_e4m3fn)
_FLOAT8_VALUES = np.arange(256, dtype=np.uint8).view(_FLOAT8).astype(np.float64)
_FLOAT8_MAX = 448.0
_SMALLEST_AMAX = 1e-4  # as in DeepSeek's act_quant
_TILE_ROWS = 64  # rows that are worked on at once: their temporaries stay in the CPU's cache


def dequantize(
    values: np.ndarray,
    scale: np.ndarray,
    block: tuple[int, int],
    dtype: np.dtype,
    offset: tuple[int, int] = (0, 0),
) -> np.ndarray:
    """``values * scale`` block by block, in ``dtype``, each product rounded once.

    Args:
      values: [N, K] float8 or int8, or uint8 [N, K/2] with packed int4: a matrix or a part of one.
      scale: of all blocks that ``values`` touches.
      block: rows and columns under one scale.
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


def recode(
    values: np.ndarray,
    scale: np.ndarray | None,
    first: int,
    forms: Forms,
    note: Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows of a matrix, or all of anything else, from one form to another.

    A few rows at a time, so that their float32 values stay in the CPU's cache.

    Args:
      scale: of the whole matrix, where it is quantized.
      first: the number of the first row; at the beginning of a block of either form.
      note: is told of dense values, of what they became, and of their new scales.

    Returns:
      Values and scales in the new form; no scales where it is not quantized.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is not finite, and found
        return _recoded(values, scale, first, forms, note)


def _recoded(
    values: np.ndarray,
    scale: np.ndarray | None,
    first: int,
    forms: Forms,
    note: Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None,
) -> tuple[np.ndarray, np.ndarray | None]:
    source, target, dtype = forms
    if not values.shape:
        return values.astype(dtype, copy=False), None
    stored, scales = [], []
    for begin in range(0, len(values), forms.rows):
        tile = values[begin : begin + forms.rows]
        if scale is not None and source is not None:
            columns = tile.shape[1] * (2 if tile.dtype == np.uint8 else 1)
            N, K = source.block_shape(columns)
            at = first + begin
            part = scale[at // N : -(-(at + len(tile)) // N)]
            wanted = np.dtype(np.float32) if target is not None else dtype
            tile = dequantize(tile, part, (N, K), wanted, (at % N, 0))
        if target is None:
            stored.append(tile.astype(dtype, copy=False))
            continue
        dense = tile.astype(np.float32, copy=False)
        quantized, made = quantize(dense, target)
        if note is not None:
            note(dense, quantized, made)
        stored.append(quantized)
        scales.append(made)
    return _joined(stored), _joined(scales) if scales else None


class Forms(NamedTuple):
    """From what form a tensor goes to what."""

    source: Quantization | None
    target: Quantization | None
    dtype: np.dtype
    """Of the result, where it is not quantized."""

    @property
    def rows(self) -> int:
        """That make whole blocks of both forms, and enough to be worth a step."""
        blocks = [q.block_shape(1)[0] for q in (self.source, self.target) if q is not None]
        rows = math.lcm(*blocks)
        return rows * max(1, 128 // rows)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _dequantize_float8(
    codes: np.ndarray, scale: np.ndarray, rows: np.ndarray, columns: np.ndarray, out: np.ndarray
) -> None:
    """By table: a row of blocks knows 256 values a block."""
    first_entry = (columns * 256).astype(np.int32)
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    for begin, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        table = _rounded(scale[rows[begin], :, None] * _FLOAT8_VALUES, out.dtype).reshape(-1)
        for first in range(begin, end, _TILE_ROWS):
            tile = slice(first, min(first + _TILE_ROWS, end))
            # Indices are in range by construction; "clip" spares NumPy a buffered copy.
            np.take(table, codes[tile] + first_entry, out=out[tile], mode="clip")


def _rounded(exact: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float64 rounded to nearest even, once: ml_dtypes goes to bfloat16 through float32."""
    if dtype != bfloat16:
        return exact.astype(dtype)
    _, exponent = np.frexp(exact)
    unit = np.ldexp(1.0, np.maximum(exponent, -125) - 8)  # -125: bfloat16's subnormals
    with np.errstate(invalid="ignore"):
        return (np.rint(exact / unit) * unit).astype(np.float32).astype(bfloat16)


def quantize(weight: np.ndarray, quantization: Quantization) -> tuple[np.ndarray, np.ndarray]:
    """Whole blocks of a float matrix: stored values and float32 scales.

    Integers: ``scale = amax / 127`` a row, or ``max(max / 7, -min / 8)`` a group, which uses the
    whole range. Float8: ``max(amax, 1e-4) / 448`` a block, rounded up to a power of two under
    ue8m0. Values are ``weight / scale``, rounded to nearest even.
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
        scale[scale < np.finfo(np.float32).tiny] = 1  # zeros, or what devices take for zeros
        scales[tile] = scale
        rows /= scale.repeat(bk, axis=1)[:, :K]
        np.clip(np.rint(rows, out=rows), least, most, out=rows)
        values[tile] = rows if quantization.bits == 8 else pack_int4(rows.astype(np.int8))
    return values, scales


def pack_int4(values: np.ndarray) -> np.ndarray:
    """int8 in -8..7, [..., K] to uint8 [..., K/2]: the even column in the low half."""
    nibbles = values.view(np.uint8)
    return (nibbles[..., ::2] & 15) | (nibbles[..., 1::2] << 4)


def unpack_int4(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., K/2] to int8 [..., K]; inverse of :func:`pack_int4`."""
    signed = packed.view(np.int8)
    pairs = np.stack([np.left_shift(signed, 4) >> 4, signed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def _tiles(rows: int) -> list[slice]:
    return [slice(first, min(first + _TILE_ROWS, rows)) for first in range(0, rows, _TILE_ROWS)]
