"""One unit of a conversion: read, check, convert, write, read back."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from dsv3_jax.checkpoint.array_files import ArrayFiles
from dsv3_jax.checkpoint.arrays import as_bytes, digest
from dsv3_jax.checkpoint.check import tensor_kind
from dsv3_jax.checkpoint.conversion_plan import ConversionPlan, Unit
from dsv3_jax.checkpoint.formats import Forms, dequantize, recode
from dsv3_jax.checkpoint.threads import Progress
from dsv3_jax.checkpoint.values import check_finite, check_scale

Line = dict[str, Any]
"""Of the journal."""


def convert_unit(plan: ConversionPlan, unit: Unit, files: ArrayFiles, progress: Progress) -> Line:
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
        line["error"] = {"kind": tensor_kind(unit.tensors[0]), "tensors": len(tensors)} | {
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

    def __init__(self, plan: ConversionPlan, unit: Unit, expert: int, name: str):
        self.read: dict[str, xxhash.xxh3_128] = {name: xxhash.xxh3_128()}
        self.written = {array.tensors[expert]: xxhash.xxh3_128() for array in unit.arrays}
        self.squared_error = self.squared_weight = self.largest_error = self.largest_weight = 0.0
        self._plan, self._name = plan, name
        target = plan.config.quantization if unit.scales is not None else None
        self._forms = Forms(plan.source_config.quantization, target, unit.array.dtype)
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
        parts: tuple[np.ndarray, ...] = (values,)
        if not self._plan.keeps:
            made, scale = recode(values, self._scale, rows.start or 0, self._forms, self._note)
            parts = (made,) if scale is None else (made, scale)
            check_finite(self._name, made)  # a product, or a float32, may be too large
        for hasher, part in zip(self.written.values(), parts, strict=True):
            hasher.update(as_bytes(part))
        return parts

    def _note(self, dense: np.ndarray, stored: np.ndarray, scale: np.ndarray) -> None:
        """What quantization made of some rows."""
        assert self._forms.target is not None
        check_finite(self._name, dense)
        block = self._forms.target.block_shape(dense.shape[1])
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
