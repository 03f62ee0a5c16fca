"""Conversion of one unit of work: read, check, recode, write, read back."""

from __future__ import annotations

import numpy as np
import xxhash

from dsv3_jax.checkpoint.array_files import ArrayFiles
from dsv3_jax.checkpoint.arrays import as_bytes, digest
from dsv3_jax.checkpoint.check import tensor_kind
from dsv3_jax.checkpoint.conversion_plan import ConversionPlan, Unit
from dsv3_jax.checkpoint.formats import Recoding, dequantize, recode
from dsv3_jax.checkpoint.journal import JournalLine
from dsv3_jax.checkpoint.parameter_reader import check_finite, check_scale
from dsv3_jax.checkpoint.threads import Progress


def convert_unit(
    plan: ConversionPlan, unit: Unit, files: ArrayFiles, progress: Progress
) -> JournalLine:
    """Converts a unit chunk by chunk, and reads the result back.

    Returns:
      Line for the journal, with the hashes of all tensors read and written, and the quantization
      error if the unit is quantized.

    Raises:
      ValueError: a weight or a scale has an impossible value. The message names the tensor.
      OSError: the source or the store failed.
    """
    tensors = [
        _TensorConversion(plan, unit, expert, name)
        for expert, name in enumerate(unit.tensors, unit.first)
    ]
    for number, rows in enumerate(_chunk_rows(unit)):
        blocks = [tensor.convert(rows) for tensor in tensors]
        for array, values in zip(unit.arrays, zip(*blocks, strict=True), strict=True):
            block = np.stack(values) if array.stacked else values[0]
            files.write(array.name, array.chunk_origin(unit.first, number), block)
        progress(sum(tensor.take_bytes_read() for tensor in tensors))
    line: JournalLine = {
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
    read_back = stored_hashes(unit, files)
    for name, written in line["stored"].items():
        if read_back[name] != written:
            raise OSError(0, "the data read back differs from the data written", name)
    return line


def stored_hashes(unit: Unit, files: ArrayFiles) -> dict[str, str]:
    """Reads a unit's tensors from the store and returns their hashes by name.

    Raises:
      OSError: a chunk is missing or cannot be read.
    """
    return {
        array.tensors[e]: digest(files.tensor(array, e if array.stacked else None))
        for array in unit.arrays
        for e in range(unit.first, unit.first + unit.count)
    }


class _TensorConversion:
    """A published tensor that is being converted: its hashes and its quantization error."""

    def __init__(self, plan: ConversionPlan, unit: Unit, expert: int, name: str):
        self.read: dict[str, xxhash.xxh3_128] = {name: xxhash.xxh3_128()}
        """Running hashes of the source's tensors, by name."""
        self.written = {array.tensors[expert]: xxhash.xxh3_128() for array in unit.arrays}
        """Running hashes of the stored tensors, by name."""
        self.squared_error = self.squared_weight = self.largest_error = self.largest_weight = 0.0
        self._plan, self._name = plan, name
        target = plan.config.quantization if unit.scales is not None else None
        self._recoding = Recoding(plan.source_config.quantization, target, unit.array.dtype)
        self._source = plan.source[name]
        self._scale: np.ndarray | None = None
        self._bytes_read = 0
        if (quantization := plan.source_config.quantization) is None:
            return
        suffix = quantization.scale_suffix
        weight = name.removesuffix(suffix)
        block = quantization.block_shape(self._source.shape[-1])
        if weight != name and weight in plan.source:  # a scale whose bytes are kept
            check_scale(name, self._source[...], plan.source[weight], block)
        elif not plan.keeps_bytes and (scale := name + suffix) in plan.source:
            self._scale = plan.source[scale][...]
            check_scale(scale, self._scale, self._source, block)
            self.read[scale] = xxhash.xxh3_128(as_bytes(self._scale))
            self._bytes_read += self._scale.nbytes

    def take_bytes_read(self) -> int:
        """Returns the number of bytes read since the last call."""
        count, self._bytes_read = self._bytes_read, 0
        return count

    def convert(self, rows: slice) -> tuple[np.ndarray, ...]:
        """Reads the next rows. Returns them in the store's form, and their scales if quantized."""
        values = self._source[rows] if self._source.shape else self._source[...]
        self._bytes_read += values.nbytes
        self.read[self._name].update(as_bytes(values))
        check_finite(self._name, values)
        converted: tuple[np.ndarray, ...] = (values,)
        if not self._plan.keeps_bytes:
            stored, scale = recode(
                values, self._scale, rows.start or 0, self._recoding, self._add_error
            )
            converted = (stored,) if scale is None else (stored, scale)
            check_finite(self._name, stored)  # the product with a scale may overflow
        for hasher, array in zip(self.written.values(), converted, strict=True):
            hasher.update(as_bytes(array))
        return converted

    def _add_error(self, dense: np.ndarray, stored: np.ndarray, scale: np.ndarray) -> None:
        """Adds the quantization error of some rows."""
        assert self._recoding.target is not None
        check_finite(self._name, dense)
        block = self._recoding.target.block_shape(dense.shape[1])
        error = dequantize(stored, scale, block, np.dtype(np.float32)) - dense
        self.squared_error += float(np.vdot(error, error))
        self.squared_weight += float(np.vdot(dense, dense))
        self.largest_error = max(self.largest_error, float(np.abs(error).max()))
        self.largest_weight = max(self.largest_weight, float(np.abs(dense).max()))


def _chunk_rows(unit: Unit) -> list[slice]:
    """Returns the range of rows in each chunk of a tensor."""
    shape = unit.array.tensor_shape
    if not shape:
        return [slice(None)]
    rows = unit.array.rows_per_chunk
    return [slice(first, min(first + rows, shape[0])) for first in range(0, shape[0], rows)]
