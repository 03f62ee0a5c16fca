"""One pass over a published tensor: hash, checks, and float32 values.

A tensor is read in pieces of at most ``PIECE_ELEMENTS`` elements. A piece is converted to float32
in parts of a few hundred thousand values. No other memory is needed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import xxhash

from dsv3_jax.checkpoint.arrays import (
    Arrays,
    LazyArray,
    Progress,
    as_bytes,
    columns_per_element,
    pieces,
)
from dsv3_jax.checkpoint.formats import dequantize
from dsv3_jax.quantization import Quantization
from dsv3_jax.words import os_error_message


class Faults:
    """Bad elements of one kind in a tensor: their number and the position of the first."""

    def __init__(self, kind: str):
        self.kind = kind
        """Description for messages, such as ``"NaN or infinity"``."""
        self.count = 0
        """Number of bad elements so far."""
        self._first: list[int] = []

    def add(self, is_bad: np.ndarray, first_row: int) -> None:
        """Adds the bad elements of consecutive rows, given as a mask that begins at a row."""
        if not self.count:
            row, *others = (int(i) for i in np.unravel_index(is_bad.argmax(), is_bad.shape))
            self._first = [first_row + row, *others]
        self.count += int(is_bad.sum())

    def __str__(self) -> str:
        more = f" and {self.count - 1:,} more" if self.count > 1 else ""
        return f"{self.kind} at {self._first}{more}"


class RowReader:
    """Reads the rows of an array in order, hashes their bytes and reports the progress."""

    def __init__(self, name: str, array: LazyArray, progress: Progress):
        self.name = name
        self.array = array
        self._progress = progress
        self._hasher = xxhash.xxh3_128()
        self._rows_read = 0

    def read(self, rows: slice) -> np.ndarray:
        """Reads the next rows.

        Raises:
          OSError: the disk failed.
        """
        part = self.array[rows]
        self._hasher.update(as_bytes(part))
        self._rows_read += len(part)
        self._progress(part.nbytes)
        return part

    @property
    def is_complete(self) -> bool:
        """Whether all rows have been read."""
        return self._rows_read == self.array.shape[0]

    def digest(self) -> str:
        """Returns the hash of all rows read so far, as :func:`~.arrays.digest` computes it."""
        return self._hasher.hexdigest()


_FLOAT32 = np.dtype(np.float32)


class ScaleScan:
    """Reads the scales of a matrix once, in order, and applies them to the stored values."""

    def __init__(self, name: str, array: LazyArray, block: tuple[int, int], progress: Progress):
        self.reader = RowReader(name, array, progress)
        self.range: tuple[float, float] | None = None
        """Smallest and largest scale above 0 so far. None if there is no such scale."""
        self._block = block
        self._bad_scales = Faults("expected finite scales above 0, got another")
        self._bad_zeros = Faults("a scale of 0 over weights that are not 0")

    @property
    def rows_per_scale(self) -> int:
        """Number of matrix rows per row of scales."""
        return self._block[0]

    def read(self, rows: slice) -> np.ndarray:
        """Reads the float32 scales of the next matrix rows, which begin a block.

        A scale that is not finite is a finding. It is returned as the smallest positive number,
        because a scale of 0 could cause another finding.

        Raises:
          OSError: the disk failed.
        """
        first = rows.start // self.rows_per_scale
        stored = self.reader.read(slice(first, -(-rows.stop // self.rows_per_scale)))
        scale = stored.astype(np.float32)
        valid = np.isfinite(scale) & (scale >= 0)
        if not valid.all():
            self._bad_scales.add(~valid, first)
        if (positive := scale[valid & (scale > 0)]).size:
            low, high = self.range or (math.inf, 0.0)
            self.range = min(low, float(positive.min())), max(high, float(positive.max()))
        return np.where(np.isfinite(scale), scale, np.finfo(np.float32).tiny)

    def dequantize(
        self, values: np.ndarray, scale: np.ndarray, first_row: int, offset: int
    ) -> np.ndarray:
        """Returns the float32 values of some rows of a piece.

        Args:
          values: stored values of the rows. They begin a block.
          scale: scales of the piece, from :meth:`read`.
          first_row: first row of the piece in the matrix.
          offset: first row of ``values`` in the piece.
        """
        first = offset // self.rows_per_scale
        scale = scale[first : -(-(offset + len(values)) // self.rows_per_scale)]
        if not scale.all():
            # Only blocks with a scale of 0 keep their values here.
            is_zero = (scale == 0).astype(np.float32)
            unscaled = np.nan_to_num(dequantize(values, is_zero, self._block, _FLOAT32))
            if unscaled.any():
                first_block = (first_row + offset) // self.rows_per_scale
                self._bad_zeros.add(self._nonzero_blocks(unscaled), first_block)
        return dequantize(values, scale, self._block, _FLOAT32)

    def findings(self) -> list[str]:
        """Returns one line per kind of bad scale."""
        faults = (self._bad_scales, self._bad_zeros)
        return [f"{self.reader.name}: {each}" for each in faults if each.count]

    def _nonzero_blocks(self, values: np.ndarray) -> np.ndarray:
        """Returns a mask of the blocks that have a value other than 0."""
        mask = values != 0
        for axis, size in enumerate(self._block):
            mask = np.logical_or.reduceat(mask, range(0, mask.shape[axis], size), axis=axis)
        return mask


_PART_ELEMENTS = 2**18  # so that a float32 part stays in the CPU's cache


class Scan:
    """Reads a tensor once, together with its scales if it is quantized."""

    def __init__(
        self, name: str, arrays: Arrays, quantization: Quantization | None, progress: Progress
    ):
        self.name = name
        self.shape = arrays[name].shape
        """Shape of the values, after unpacking."""
        self.scales: ScaleScan | None = None
        """Scales of the tensor. None if it is not quantized."""
        self._values = RowReader(name, arrays[name], progress)
        self._nonfinite = Faults("NaN or infinity")
        self._error: OSError | None = None
        """Failure that ended the pass early."""
        if quantization is None or (scale := arrays.get(name + quantization.scale_suffix)) is None:
            return
        rows, columns = self.shape
        self.shape = (rows, columns * columns_per_element(arrays[name].dtype))
        block = quantization.block_shape(self.shape[1])
        self.scales = ScaleScan(name + quantization.scale_suffix, scale, block, progress)

    @property
    def row_multiple(self) -> int:
        """Number of rows per scale. Every part begins at a multiple of it."""
        return self.scales.rows_per_scale if self.scales is not None else 1

    @property
    def dtypes(self) -> tuple[np.dtype, ...]:
        """Stored dtypes of the tensor and its scales."""
        return tuple(reader.array.dtype for reader in self._readers())

    def parts(self, multiple: int) -> Iterator[np.ndarray]:
        """Yields all values in order as float32 rows. NaN and infinity are replaced by 0.

        A disk failure ends the iteration early and becomes a finding.

        Args:
          multiple: parts begin at multiples of this number of rows. It must be a multiple of
            :attr:`row_multiple`.
        """
        width = math.prod(self.shape[1:])
        step = max(_PART_ELEMENTS // width // multiple * multiple, multiple)
        # Pieces have at least 128 rows, as chunks of a store do.
        for rows in pieces(self.shape, multiple * max(1, 128 // multiple)):
            try:
                values = self._values.read(rows)
                scale = self.scales.read(rows) if self.scales is not None else None
            except OSError as error:
                self._error = error
                return
            for first in range(0, len(values), step):
                part = self._float32(values[first : first + step], scale, rows.start, first)
                finite = np.isfinite(part)
                if not finite.all():
                    self._nonfinite.add(~finite, rows.start + first)
                    part[~finite] = 0
                yield part

    def digests(self) -> dict[str, str]:
        """Returns the hashes of tensor and scales by name. Empty unless all values were read."""
        if self._error is not None or not self._values.is_complete:
            return {}
        return {reader.name: reader.digest() for reader in self._readers()}

    def findings(self) -> list[str]:
        """Returns one line per kind of problem with the values."""
        lines = [f"{self.name}: {self._nonfinite}"] if self._nonfinite.count else []
        lines += self.scales.findings() if self.scales is not None else []
        return lines if self._error is None else [*lines, unreadable(self.name, self._error)]

    def _readers(self) -> list[RowReader]:
        return [self._values, *([self.scales.reader] if self.scales is not None else [])]

    def _float32(
        self, values: np.ndarray, scale: np.ndarray | None, first_row: int, offset: int
    ) -> np.ndarray:
        """Converts the rows from ``offset`` on of the piece that begins at ``first_row``."""
        # An overflow becomes infinity, which is a finding.
        with np.errstate(over="ignore", invalid="ignore"):
            if self.scales is None or scale is None:
                return values.astype(np.float32)
            return self.scales.dequantize(values, scale, first_row, offset)


def unreadable(name: str, error: OSError) -> str:
    """Returns the finding for a tensor that cannot be read."""
    return f"{name}: cannot be read: {os_error_message(error)}"
