"""Scales of a quantized matrix, read and checked together with its rows."""

from __future__ import annotations

import math

import numpy as np

from dsv3_jax.checkpoint.arrays import LazyArray
from dsv3_jax.checkpoint.faults import Faults
from dsv3_jax.checkpoint.formats import dequantize
from dsv3_jax.checkpoint.row_reader import RowReader
from dsv3_jax.checkpoint.threads import Progress

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
