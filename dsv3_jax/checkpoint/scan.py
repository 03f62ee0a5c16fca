"""One published tensor, read once and part by part: hashed, checked, as the values it stands for.

A part has a few hundred thousand values, a piece that is read ``PIECE_ELEMENTS`` at most: that, its
float32 part and their temporaries are all that a scan holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import xxhash

from dsv3_jax.checkpoint.arrays import Arrays, LazyArray, as_bytes, pieces
from dsv3_jax.checkpoint.formats import dequantize
from dsv3_jax.checkpoint.messages import os_error_message
from dsv3_jax.checkpoint.threads import Progress
from dsv3_jax.quantization import Quantization

_PART_ELEMENTS = 2**18  # float32 parts that stay in the CPU's cache


class Scan:
    """A tensor with its scale, if it has one, on its one way through memory.

    Attributes:
      shape: of the values, whatever they are packed in.
      multiple: rows under one scale; parts begin at multiples of them.
      scale_range: smallest and largest of the scales above 0, None without any.
    """

    def __init__(
        self, name: str, arrays: Arrays, quantization: Quantization | None, count: Progress
    ):
        self.name = name
        self._count = count
        self._values = arrays[name]
        self._hash = xxhash.xxh3_128()
        self.scale_name = name + quantization.scale_suffix if quantization else ""
        self._scale = arrays.get(self.scale_name) if quantization else None
        self.shape = self._values.shape
        self._block, self.multiple = (1, 1), 1
        if quantization is not None and self._scale is not None:
            packed = 2 if self._values.dtype == np.uint8 else 1
            self.shape = (self.shape[0], self.shape[1] * packed)
            self._block = quantization.block_shape(self.shape[1])
            self.multiple = self._block[0]
        self._scale_hash = xxhash.xxh3_128()
        self.scale_range: tuple[float, float] | None = None
        self._bad_values = _Places("NaN or infinity")
        self._bad_scales = _Places("expected finite scales above 0, got another")
        self._wrong_zeros = _Places("a scale of 0 over weights that are not 0")
        self._rows_read = 0
        self._error: OSError | None = None

    @property
    def dtypes(self) -> tuple[np.dtype, ...]:
        """As stored, of the tensor and its scale."""
        stored = (self._values, self._scale)
        return tuple(array.dtype for array in stored if array is not None)

    def parts(self, multiple: int) -> Iterator[np.ndarray]:
        """All values in order, in float32 and rows of the first axis; what is not finite is 0.

        Ends early where the disk fails, which is a finding.

        Args:
          multiple: of rows that a part begins at; a multiple of the scan's own.
        """
        width = math.prod(self.shape[1:])
        step = max(_PART_ELEMENTS // width // multiple * multiple, multiple)
        # At 128 rows or more, as the chunks of a store are.
        for rows in pieces(self.shape, multiple * max(1, 128 // multiple)):
            try:
                values = self._values[rows]
                scale = self._read_scale(rows)
            except OSError as error:
                self._error = error
                return
            self._hash.update(as_bytes(values))
            self._rows_read += len(values)
            self._count(values.nbytes)
            for first in range(0, len(values), step):
                part = self._float32(values[first : first + step], scale, rows.start, first)
                finite = np.isfinite(part)
                if not finite.all():
                    self._bad_values.add(~finite, rows.start + first)
                    part[~finite] = 0
                yield part

    def digests(self) -> dict[str, str]:
        """Of the tensor and its scale, by name; empty unless all of it was read."""
        if self._rows_read < self.shape[0]:
            return {}
        out = {self.name: self._hash.hexdigest()}
        if self._scale is not None:
            out[self.scale_name] = self._scale_hash.hexdigest()
        return out

    def findings(self) -> list[str]:
        """What is wrong with the values, a line each."""
        named = (
            (self.name, self._bad_values),
            (self.scale_name, self._bad_scales),
            (self.scale_name, self._wrong_zeros),
        )
        out = [f"{name}: {places}" for name, places in named if places.count]
        return out if self._error is None else [*out, unreadable(self.name, self._error)]

    def _read_scale(self, rows: slice) -> np.ndarray | None:
        """Scales of these rows; those that are not finite as next to nothing."""
        if self._scale is None:
            return None
        first = rows.start // self.multiple
        stored = self._scale[first : -(-rows.stop // self.multiple)]
        self._scale_hash.update(as_bytes(stored))
        self._count(stored.nbytes)
        scale = stored.astype(np.float32)
        good = np.isfinite(scale) & (scale >= 0)
        if not good.all():
            self._bad_scales.add(~good, first)
        if (positive := scale[good & (scale > 0)]).size:
            low, high = self.scale_range or (math.inf, 0.0)
            self.scale_range = min(low, float(positive.min())), max(high, float(positive.max()))
        # Not as 0, which would be a finding of its own. A NaN below stays one.
        return np.where(np.isfinite(scale), scale, np.finfo(np.float32).tiny)

    def _float32(
        self, values: np.ndarray, scale: np.ndarray | None, begin: int, first: int
    ) -> np.ndarray:
        """Rows ``first`` on of the piece that begins at row ``begin``."""
        # Overflow becomes infinity, which is found.
        with np.errstate(over="ignore", invalid="ignore"):
            if scale is None:
                return values.astype(np.float32)
            blocks = scale[first // self.multiple : -(-(first + len(values)) // self.multiple)]
            if not blocks.all():
                zero = (blocks == 0).astype(np.float32)
                under = np.nan_to_num(dequantize(values, zero, self._block, np.dtype(np.float32)))
                if under.any():
                    self._wrong_zeros.add(self._by_block(under), (begin + first) // self.multiple)
            return dequantize(values, blocks, self._block, np.dtype(np.float32))

    def _by_block(self, values: np.ndarray) -> np.ndarray:
        """Which blocks have a value other than 0."""
        filled = values != 0
        for axis, size in enumerate(self._block):
            filled = np.logical_or.reduceat(filled, range(0, filled.shape[axis], size), axis=axis)
        return filled


class _Places:
    """Where a tensor is wrong: the first place, and how many there are."""

    def __init__(self, what: str):
        self.what = what
        self.count = 0
        self._first: list[int] = []

    def add(self, wrong: np.ndarray, first_row: int) -> None:
        if not self.count:
            row, *rest = (int(i) for i in np.unravel_index(wrong.argmax(), wrong.shape))
            self._first = [first_row + row, *rest]
        self.count += int(wrong.sum())

    def __str__(self) -> str:
        more = f" and {self.count - 1:,} more" if self.count > 1 else ""
        return f"{self.what} at {self._first}{more}"


def unreadable(name: str, error: OSError) -> str:
    return f"{name}: cannot be read: {os_error_message(error)}"


def nbytes(array: LazyArray) -> int:
    return math.prod(array.shape) * array.dtype.itemsize
