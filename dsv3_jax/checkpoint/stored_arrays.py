"""The arrays of a store: the model's parameters with experts stacked, divided into chunks.

An array is named after its parameter in the tree of :class:`~dsv3_jax.model.DeepSeekV3`, for
example ``layers.3.mlp.experts.gate_proj.weight`` [E, N, K]. The copies of embedding and head in MTP
layers are not stored. A chunk is one file and is written at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from dsv3_jax.checkpoint.arrays import PIECE_ELEMENTS, Arrays, columns_per_element, rows_per_piece
from dsv3_jax.checkpoint.reader import NUMPY
from dsv3_jax.checkpoint.tensor_table import copies, stored_location, tensor_table
from dsv3_jax.config import ModelConfig

_INNER = 512  # maximum rows and columns of an inner chunk, which can be read on its own


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """One array of the store."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    tensors: tuple[str, ...]  # published tensors in the array: one, or one per expert in order
    stacked: bool  # whether the first axis is the expert
    chunk: tuple[int, ...]  # shape of a chunk, which is one file

    @property
    def files(self) -> int:
        """Number of chunks."""
        sizes = zip(self.shape, self.chunk, strict=True)
        return math.prod(-(-size // chunk) for size, chunk in sizes)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of one published tensor."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def rows_per_chunk(self) -> int:
        """Number of a tensor's rows in one chunk. 0 for a tensor without axes."""
        return (*self.chunk[1 if self.stacked else 0 :], 0)[0]

    def chunk_origin(self, expert: int, number: int) -> tuple[int, ...]:
        """Returns the index of the first element of a tensor's chunk ``number``. ``expert`` is the
        index of the tensor in a stacked array."""
        row = number * self.rows_per_chunk
        begin = (expert, row) if self.stacked else (row,)
        return (*begin, *(0 for _ in self.shape))[: len(self.shape)]

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape of an inner chunk, the smallest part of a file that can be read on its own. A
        device reads only the inner chunks of its shard."""
        stack = self.chunk[:-2]
        return (*(1 for _ in stack), *map(_inner_size, self.chunk[len(stack) :]))

    @property
    def nbytes(self) -> int:
        """Size on disk, where the last chunk of an axis is padded to whole inner chunks."""
        sizes = zip(self.shape, self.inner, strict=True)
        return math.prod(-(-size // inner) * inner for size, inner in sizes) * self.dtype.itemsize


def stored_arrays(
    config: ModelConfig, *, multiple: int, unchanged: Arrays | None = None
) -> dict[str, StoredArray]:
    """Returns the arrays of a store of this config by name, in the order data flows. Chunks of a
    matrix have a multiple of ``multiple`` rows. The dtypes are those of ``unchanged``, the source's
    tensors, if the store keeps their bytes, and otherwise those of the config."""
    table, not_stored = tensor_table(config), copies(config)
    tensors: dict[str, list[str]] = {}
    stacked = set()
    for name in table:
        if name not in not_stored:
            array, expert = stored_location(config, name)
            tensors.setdefault(array, []).append(name)
            if expert is not None:
                stacked.add(array)
    arrays: dict[str, StoredArray] = {}
    for array, names in tensors.items():
        tensor_shape = table[names[0]].shape
        dtype = NUMPY[table[names[0]].dtype]
        if unchanged is not None:
            dtype = _common_dtype(unchanged, names)
        shape = (len(names), *tensor_shape) if array in stacked else tensor_shape
        # The size of a chunk is limited by its unpacked values.
        unpacked = (*shape[:-1], *(n * columns_per_element(dtype) for n in shape[-1:]))
        chunk = (*_chunk(unpacked, array in stacked, multiple)[:-1], *shape[-1:])
        if unchanged is None and config.quantization is not None:
            # A chunk of scales belongs to a chunk of the matrix.
            weight = array.removesuffix(config.quantization.scale_suffix)
            if weight != array:
                N, _ = config.quantization.block_shape(1)
                rows = -(-arrays[weight].chunk[-2] // N)
                chunk = (*arrays[weight].chunk[:-2], rows, tensor_shape[1])
        arrays[array] = StoredArray(array, shape, dtype, tuple(names), array in stacked, chunk)
    return arrays


def _chunk(shape: tuple[int, ...], stacked: bool, multiple: int) -> tuple[int, ...]:
    if math.prod(shape) <= PIECE_ELEMENTS // 16:
        return shape
    if not stacked:
        return (min(rows_per_piece(shape, multiple), shape[0]), *shape[1:])
    return (1, min(rows_per_piece(shape[1:], multiple), shape[1]), *shape[2:])


def _common_dtype(tensors: Arrays, names: list[str]) -> np.dtype:
    first = tensors[names[0]].dtype
    for name in names:
        if tensors[name].dtype != first:
            got = tensors[name].dtype
            raise ValueError(f"{name}: expected {first} as in {names[0]}, got {got}")
    return first


def _inner_size(size: int) -> int:
    """Returns the largest divisor of ``size`` up to ``_INNER``, or ``size`` if it is very small."""
    best = next(d for d in itertools.count(min(size, _INNER), -1) if size % d == 0)
    return best if best >= _INNER // 16 else size
