"""One unit of a conversion: read, check, convert, write, read back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from dsv3_jax.checkpoint.array_files import ArrayFiles
from dsv3_jax.checkpoint.arrays import as_bytes, digest
from dsv3_jax.checkpoint.check import kind_of
from dsv3_jax.checkpoint.formats import dequantize, quantize
from dsv3_jax.checkpoint.plan import Plan, Unit
from dsv3_jax.checkpoint.values import check_finite, check_scale

Progress = Callable[[int], None]
"""Is told of bytes of the source that are done."""

Line = dict[str, Any]
"""Of the journal."""


def convert_unit(plan: Plan, unit: Unit, files: ArrayFiles, progress: Progress) -> Line:
    """Does all of it, some rows at a time.

    Returns:
      Hashes of what was read and of what was written, and what quantization did to the values.

    Raises:
      ValueError: values that no weight or scale may have, with the tensor's name.
      OSError: source or store failed.
    """
    tensors = [_Conversion(plan, unit, e, name) for e, name in enumerate(unit.tensors, unit.first)]
    for part, rows in enumerate(_row_ranges(unit)):
        blocks = [tensor.convert(rows) for tensor in tensors]
        for array, values in zip(unit.arrays, zip(*blocks, strict=True), strict=True):
            block = np.stack(values) if array.stacked else values[0]
            files.write(array.name, array.origin(unit.first, part), block)
        progress(sum(tensor.take_bytes_read() for tensor in tensors))
    line: Line = {
        "unit": unit.key,
        "source": {n: h.hexdigest() for t in tensors for n, h in t.read.items()},
        "stored": {n: h.hexdigest() for t in tensors for n, h in t.written.items()},
    }
    if unit.scales is not None:
        line["error"] = {"kind": kind_of(unit.tensors[0]), "tensors": len(tensors)} | {
            "error": sum(t.squared_error for t in tensors),
            "weight": sum(t.squared_weight for t in tensors),
            "largest": max(t.largest_error for t in tensors),
            "largest_weight": max(t.largest_weight for t in tensors),
        }
    found = stored_hashes(unit, files)
    for name, wanted in line["stored"].items():
        if found[name] != wanted:
            raise OSError(0, "what was read back is not what was written", name)
    return line


def stored_hashes(unit: Unit, files: ArrayFiles) -> dict[str, str]:
    """Of the unit's tensors, read from the store.

    Raises:
      OSError: a chunk is missing or cannot be read.
    """
    return {
        array.tensors[e]: digest(files.tensor(array, e if array.stacked else None))
        for array in unit.arrays
        for e in range(unit.first, unit.first + unit.count)
    }


class _Conversion:
    """A published tensor on its way: what was read of it, what written, what lost."""

    def __init__(self, plan: Plan, unit: Unit, expert: int, name: str):
        self.read: dict[str, xxhash.xxh3_128] = {name: xxhash.xxh3_128()}
        self.written = {array.tensors[expert]: xxhash.xxh3_128() for array in unit.arrays}
        self.squared_error = self.squared_weight = self.largest_error = self.largest_weight = 0.0
        self._plan, self._unit, self._name = plan, unit, name
        self._source = plan.source[name]
        self._scale: np.ndarray | None = None
        self._bytes_read = 0
        if (quantization := plan.source_config.quantization) is None:
            return
        suffix = quantization.scale_suffix
        weight = name.removesuffix(suffix)
        block = quantization.block_shape(self._source.shape[-1])
        if weight != name and weight in plan.source:  # a scale that is kept
            check_scale(name, self._source[...], plan.source[weight], block)
        elif not plan.keeps and (scale := name + suffix) in plan.source:
            self._scale = plan.source[scale][...]
            check_scale(scale, self._scale, self._source, block)
            self.read[scale] = xxhash.xxh3_128(as_bytes(self._scale))
            self._bytes_read += self._scale.nbytes

    def take_bytes_read(self) -> int:
        """Since the last call."""
        count, self._bytes_read = self._bytes_read, 0
        return count

    def convert(self, rows: slice) -> tuple[np.ndarray, ...]:
        """The rows as the store has them; with the scales that were made for them."""
        values = self._source[rows] if self._source.shape else self._source[...]
        self._bytes_read += values.nbytes
        self.read[self._name].update(as_bytes(values))
        check_finite(self._name, values)
        parts = (values,) if self._plan.keeps else self._converted(values, rows.start or 0)
        for hasher, part in zip(self.written.values(), parts, strict=True):
            hasher.update(as_bytes(part))
        return parts

    def _converted(self, values: np.ndarray, first: int) -> tuple[np.ndarray, ...]:
        """A few rows at a time, so that their float32 values stay in the CPU's cache."""
        target = self._plan.config.quantization if self._unit.scales is not None else None
        step = self._plan.multiple
        parts = []
        for begin in range(0, max(len(values) if values.shape else 1, 1), step):
            tile = values[begin : begin + step] if values.shape else values
            if self._scale is not None:
                dtype = np.dtype(np.float32) if target is not None else self._unit.array.dtype
                tile = self._dequantized(tile, first + begin, dtype)
            if target is None:
                parts.append((tile.astype(self._unit.array.dtype, copy=False),))
                continue
            dense = tile.astype(np.float32, copy=False)
            stored, scale = quantize(dense, target)
            self._note_error(dense, stored, scale)
            parts.append((stored, scale))
        return tuple(p[0] if len(p) == 1 else np.concatenate(p) for p in zip(*parts, strict=True))

    def _dequantized(self, tile: np.ndarray, first: int, dtype: np.dtype) -> np.ndarray:
        quantization = self._plan.source_config.quantization
        assert quantization is not None
        assert self._scale is not None
        block = quantization.block_shape(tile.shape[1])
        scale = self._scale[first // block[0] : -(-(first + len(tile)) // block[0])]
        return dequantize(tile, scale, block, dtype, (first % block[0], 0))

    def _note_error(self, dense: np.ndarray, stored: np.ndarray, scale: np.ndarray) -> None:
        target = self._plan.config.quantization
        assert target is not None
        block = target.block_shape(dense.shape[1])
        error = dequantize(stored, scale, block, np.dtype(np.float32)) - dense
        self.squared_error += float(np.vdot(error, error))
        self.squared_weight += float(np.vdot(dense, dense))
        self.largest_error = max(self.largest_error, float(np.abs(error).max()))
        self.largest_weight = max(self.largest_weight, float(np.abs(dense).max()))


def _row_ranges(unit: Unit) -> list[slice]:
    """Rows of the tensors that fill one file after the other."""
    axes = unit.array.tensor_shape
    if not axes:
        return [slice(None)]
    starts = range(0, axes[0], unit.array.rows)
    return [slice(first, min(first + unit.array.rows, axes[0])) for first in starts]
