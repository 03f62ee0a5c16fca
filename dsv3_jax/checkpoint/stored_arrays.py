"""What arrays a store holds: the model's parameters, experts stacked, cut into chunks.

An array is named as its parameter in the tree of :class:`~dsv3_jax.model.DeepSeekV3`, for example
``layers.3.mlp.experts.gate_proj.weight`` [E, N, K]. The copies of embedding and head that MTP
layers carry are not held twice. A chunk is one file, and what is written at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from dsv3_jax.checkpoint.arrays import PIECE_ELEMENTS, Arrays, rows_of_a_piece
from dsv3_jax.checkpoint.parameter_names import stored_location
from dsv3_jax.checkpoint.safetensors_file import NUMPY
from dsv3_jax.checkpoint.tensor_table import copies, tensor_table
from dsv3_jax.config import ModelConfig

_INNER = 512  # rows and columns that can be read without the rest of their file


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of the store."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    tensors: tuple[str, ...]
    """The published tensors in it: one, or one an expert, in order."""
    stacked: bool
    chunk: tuple[int, ...]
    """Shape of the part in one file."""

    @property
    def files(self) -> int:
        sizes = zip(self.shape, self.chunk, strict=True)
        return math.prod(-(-size // part) for size, part in sizes)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Of each of its tensors."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def rows(self) -> int:
        """Of a tensor, in one file; 0 for one without axes."""
        return (*self.chunk[1 if self.stacked else 0 :], 0)[0]

    def origin(self, expert: int, part: int) -> tuple[int, ...]:
        """Where the file begins that has the expert's (if any) rows from ``part * rows`` on."""
        begin = (expert, part * self.rows) if self.stacked else (part * self.rows,)
        return (*begin, *(0 for _ in self.shape))[: len(self.shape)]

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape of what can be read of a chunk by itself: a device's share, say."""
        stack = self.chunk[:-2]
        return (*(1 for _ in stack), *map(_divisor, self.chunk[len(stack) :]))

    @property
    def nbytes(self) -> int:
        """On disk, where the last chunk of an axis is filled up to whole inner ones."""
        sizes = zip(self.shape, self.inner, strict=True)
        return math.prod(-(-size // part) * part for size, part in sizes) * self.dtype.itemsize


def stored_arrays(
    config: ModelConfig, *, multiple: int, kept: Arrays | None = None
) -> dict[str, StoredArray]:
    """The arrays of a store of this config, by name, in the order data flows.

    Args:
      multiple: of rows that a chunk of a matrix should be.
      kept: tensors that are held as they are, in their own dtypes; None: in the config's.

    Raises:
      ValueError: experts of one array have different dtypes.
    """
    table, left_out = tensor_table(config), copies(config)
    tensors: dict[str, list[str]] = {}
    stacked = set()
    for name in table:
        if name not in left_out:
            array, expert = stored_location(config, name)
            tensors.setdefault(array, []).append(name)
            if expert is not None:
                stacked.add(array)
    out = {}
    for array, names in tensors.items():
        shape = table[names[0]].shape
        dtype = NUMPY[table[names[0]].dtype]
        if kept is not None:
            dtype = _common_dtype(kept, names)
        whole = (len(names), *shape) if array in stacked else shape
        # A piece of int4 comes from twice as many numbers.
        numbers = (*whole[:-1], 2 * whole[-1]) if dtype == np.uint8 else whole
        chunk = (*_chunk(numbers, array in stacked, multiple)[:-1], *whole[-1:])
        if kept is None and config.quantization is not None:
            # A piece of a matrix brings its scales along.
            weight = array.removesuffix(config.quantization.scale_suffix)
            if weight != array:
                N, _ = config.quantization.block_shape(1)
                rows = -(-out[weight].chunk[-2] // N)
                chunk = (*out[weight].chunk[:-2], rows, shape[1])
        out[array] = StoredArray(array, whole, dtype, tuple(names), array in stacked, chunk)
    return out


def _chunk(shape: tuple[int, ...], stacked: bool, multiple: int) -> tuple[int, ...]:
    if math.prod(shape) <= PIECE_ELEMENTS // 16:
        return shape
    if not stacked:
        return (min(rows_of_a_piece(shape, multiple), shape[0]), *shape[1:])
    return (1, min(rows_of_a_piece(shape[1:], multiple), shape[1]), *shape[2:])


def _common_dtype(kept: Arrays, names: list[str]) -> np.dtype:
    first = kept[names[0]].dtype
    for name in names:
        if kept[name].dtype != first:
            raise ValueError(f"{name}: expected {first} as in {names[0]}, got {kept[name].dtype}")
    return first


def _divisor(size: int) -> int:
    """The largest divisor up to ``_INNER``, or all of a size that has no good one."""
    best = next(d for d in itertools.count(min(size, _INNER), -1) if size % d == 0)
    return best if best >= _INNER // 16 else size
