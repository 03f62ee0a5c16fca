"""One pass over a published tensor: hash, checks, and float32 values.

A tensor is read in pieces of at most ``PIECE_ELEMENTS`` elements. A piece is converted to float32
in parts of a few hundred thousand values. No other memory is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from dsv3_jax.checkpoint.arrays import Arrays, columns_per_element, pieces
from dsv3_jax.checkpoint.faults import Faults
from dsv3_jax.checkpoint.messages import os_error_message
from dsv3_jax.checkpoint.row_reader import RowReader
from dsv3_jax.checkpoint.scale_scan import ScaleScan
from dsv3_jax.checkpoint.threads import Progress
from dsv3_jax.quantization import Quantization

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
