"""The arrays of a store on disk: an orbax checkpoint of Zarr 3 arrays without compression.

orbax writes the tree (:mod:`dsv3_jax.checkpoint.array_tree`) and can restore all of it. Chunks are
written one by one, which orbax does not support, so this module uses TensorStore, the library below
orbax. Names and contents of the files depend only on the arrays. Reading a missing chunk is an
error, and never returns zeros.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from dsv3_jax.checkpoint import manifest
from dsv3_jax.checkpoint.reader import NUMPY
from dsv3_jax.checkpoint.stored_arrays import StoredArray
from dsv3_jax.checkpoint.tensor_table import stored_location
from dsv3_jax.files import check_file_name

WEIGHTS = "weights"  # folder of a store with the arrays


class ArrayFiles:
    """The arrays in a directory, opened by name on first use."""

    def __init__(self, directory: Path, threads: int = 2):
        self.directory = directory
        # Syncing every file would halve the speed. A conversion syncs all files at its end.
        self._context = ts.Context(
            {
                "file_io_sync": False,
                "file_io_concurrency": {"limit": max(threads, 4)},
                "data_copy_concurrency": {"limit": threads},
            }
        )
        self._open: dict[str, ts.TensorStore] = {}

    def __getitem__(self, name: str) -> ts.TensorStore:
        if (array := self._open.get(name)) is None:
            check_file_name(name, self.directory)
            spec = {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": str(self.directory / name)},
                "store_data_equal_to_fill_value": True,
                "fill_missing_data_reads": False,
            }
            array = ts.open(spec, context=self._context).result()
            self._open[name] = array
        return array

    def write(self, name: str, begin: tuple[int, ...], block: np.ndarray) -> None:
        """Writes a block of whole chunks whose first element has the index ``begin``."""
        index = tuple(slice(b, b + n) for b, n in zip(begin, block.shape, strict=True))
        try:
            target = self[name][index]
            target.write(block, can_reference_source_data_indefinitely=True).result()
        except ValueError as error:  # the only exception type of TensorStore
            raise failure(self.directory / name, error) from None

    def read(self, name: str, index: Any) -> np.ndarray:
        """Reads a part of an array."""
        try:
            return self[name][index].read().result()
        except ValueError as error:
            raise failure(self.directory / name, error) from None

    def check(self, name: str, expert: int | None, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Checks that an array contains a tensor of this shape and dtype."""
        try:
            array = self[name]
        except ValueError as error:
            raise failure(self.directory / name, error) from None
        got_shape = array.shape if expert is None else array.shape[1:]
        got_dtype = array.dtype.numpy_dtype
        if got_shape != shape or got_dtype != dtype:
            message = f"expected tensors of {dtype} {shape}, got {got_dtype} {got_shape}"
            raise OSError(None, message, str(self.directory / name))
        if expert is not None and not 0 <= expert < array.shape[0]:
            message = f"expected more than {expert} experts, got {array.shape[0]}"
            raise OSError(None, message, str(self.directory / name))

    def tensor(self, array: StoredArray, expert: int | None) -> TensorView:
        """Returns a tensor in an array. ``expert`` is None unless the array is stacked."""
        return TensorView(self, array.name, expert, array.tensor_shape, array.dtype)

    def remove_unfinished(self) -> None:
        """Deletes the lock files that a killed writer left next to the chunks."""
        for path in self.directory.rglob("*.__lock"):
            path.unlink()


class TensorView:
    """A tensor in a store. Implements :class:`~dsv3_jax.checkpoint.arrays.LazyArray`."""

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

    def __getitem__(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        self._files.check(self._array, self._expert, self.shape, self.dtype)
        return self._files.read(
            self._array, index if self._expert is None else (self._expert, *index)
        )


def failure(path: Path, error: Exception) -> OSError:
    """Converts an exception of TensorStore to an OSError with the system's message alone, without
    TensorStore's error codes, specs and C++ source locations."""
    line = re.split(r" \[[a-z_ ]+=", str(error).splitlines()[0])[0]
    return OSError(None, line.rsplit(": ", 1)[1] if "Failed" in line else line, str(path))


class StoreReader(dict[str, TensorView]):
    """The tensors of a store by published name. Values are read on demand, chunk by chunk. Raises
    ValueError if the store is incomplete, or its manifest is damaged."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.manifest = manifest.read(directory)
        self.config = self.manifest.model_config  # the model in the form that the store has
        self.source = directory / manifest.FOLDER  # the source's small files, such as the tokenizer
        files = ArrayFiles(directory / WEIGHTS)
        for name, record in self.manifest.tensors.items():
            try:
                array, expert = stored_location(self.config, name)
            except (ValueError, IndexError):
                raise ValueError(
                    f"{directory / manifest.NAME}: expected the name of a tensor, got {name!r:.200}"
                ) from None
            shape, dtype = tuple(record.shape), NUMPY[record.dtype]
            self[name] = TensorView(files, array, expert, shape, dtype)
