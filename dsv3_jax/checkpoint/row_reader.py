"""Sequential reading of an array with a running hash."""

from __future__ import annotations

import numpy as np
import xxhash

from dsv3_jax.checkpoint.arrays import LazyArray, as_bytes
from dsv3_jax.checkpoint.threads import Progress


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
