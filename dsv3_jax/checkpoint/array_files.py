"""The arrays of a store on disk: an orbax checkpoint of Zarr 3 arrays without compression.

orbax writes the tree (:mod:`dsv3_jax.checkpoint.array_tree`) and opens all of it; the chunks are
written one by one, which orbax cannot do, through TensorStore, on which orbax itself stands. File
names and contents depend on the arrays alone. A chunk that is not there is an error to whoever
reads it, never a block of zeros.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from dsv3_jax.checkpoint.stored_arrays import StoredArray
from dsv3_jax.files import check_file_name


class ArrayFiles:
    """The arrays below a directory, by name."""

    def __init__(self, directory: Path, threads: int = 2):
        self.directory = directory
        # Not synced file by file, which halves the speed: a conversion syncs them all in the end.
        self._context = ts.Context(
            {
                "file_io_sync": False,
                "file_io_concurrency": {"limit": max(threads, 4)},
                "data_copy_concurrency": {"limit": threads},
            }
        )
        self._open: dict[str, ts.TensorStore] = {}

    def __getitem__(self, name: str) -> ts.TensorStore:
        if (found := self._open.get(name)) is None:
            check_file_name(name, self.directory)
            spec = {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": str(self.directory / name)},
                "store_data_equal_to_fill_value": True,
                "fill_missing_data_reads": False,
            }
            found = ts.open(spec, context=self._context).result()
            self._open[name] = found
        return found

    def write(self, name: str, begin: tuple[int, ...], block: np.ndarray) -> None:
        """Whole chunks, from ``begin`` on.

        Raises:
          OSError: the disk is full or failed.
        """
        where = tuple(slice(b, b + n) for b, n in zip(begin, block.shape, strict=True))
        try:
            target = self[name][where]
            target.write(block, can_reference_source_data_indefinitely=True).result()
        except ValueError as error:  # TensorStore's only kind
            raise failure(self.directory / name, error) from None

    def read(self, name: str, index: Any) -> np.ndarray:
        """
        Raises:
          OSError: a chunk is missing, damaged, or cannot be read.
        """
        try:
            return self[name][index].read().result()
        except ValueError as error:
            raise failure(self.directory / name, error) from None

    def check(self, name: str, expert: int | None, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """
        Raises:
          OSError: the array cannot be opened, or it does not hold such a tensor.
        """
        try:
            array = self[name]
        except ValueError as error:
            raise failure(self.directory / name, error) from None
        found, got = array.shape if expert is None else array.shape[1:], array.dtype.numpy_dtype
        if found != shape or got != dtype:
            line = f"expected tensors of {dtype} {shape}, got {got} {found}"
            raise OSError(None, line, str(self.directory / name))
        if expert is not None and not 0 <= expert < array.shape[0]:
            line = f"expected more than {expert} experts, got {array.shape[0]}"
            raise OSError(None, line, str(self.directory / name))

    def tensor(self, array: StoredArray, expert: int | None) -> TensorView:
        """One of the published tensors in the array."""
        return TensorView(self, array.name, expert, array.tensor_shape, array.dtype)

    def remove_unfinished(self) -> None:
        """Deletes what a killed writer left beside the chunks."""
        for path in self.directory.rglob("*.__lock"):
            path.unlink()


class TensorView:
    """A tensor of the store, a :class:`~dsv3_jax.checkpoint.arrays.LazyArray`."""

    __slots__ = ("_array", "_expert", "_files", "dtype", "shape")

    def __init__(
        self,
        files: ArrayFiles,
        array: str,
        expert: int | None,
        shape: tuple[int, ...],
        dtype: np.dtype,
    ):
        self._files, self._array, self._expert = files, array, expert
        self.shape, self.dtype = shape, dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        self._files.check(self._array, self._expert, self.shape, self.dtype)
        return self._files.read(
            self._array, index if self._expert is None else (self._expert, *index)
        )


def failure(path: Path, error: Exception) -> OSError:
    """What the system said, out of a message with TensorStore's codes, specs and places in C++."""
    line = re.split(r" \[[a-z_ ]+=", str(error).splitlines()[0])[0]
    return OSError(None, line.rsplit(": ", 1)[1] if "Failed" in line else line, str(path))
