"""The plan of a conversion, made from headers alone: arrays, units of work, bytes, memory; and the
conversion of one unit: read, check, recode, write, read back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash
from ml_dtypes import bfloat16

from dsv3_jax.checkpoint.arrays import PIECE_ELEMENTS, Progress, as_bytes, digest, nbytes
from dsv3_jax.checkpoint.check import as_stored, check_tensors, tensor_kind
from dsv3_jax.checkpoint.formats import Recoding, check_finite, check_scale, dequantize, recode
from dsv3_jax.checkpoint.journal import JournalLine
from dsv3_jax.checkpoint.kinds import describe, is_store
from dsv3_jax.checkpoint.reader import CheckpointReader
from dsv3_jax.checkpoint.store import ArrayFiles
from dsv3_jax.checkpoint.stored_arrays import StoredArray, stored_arrays
from dsv3_jax.checkpoint.tensor_table import UNUSED_SUFFIXES, copies
from dsv3_jax.config import ModelConfig
from dsv3_jax.field_checks import check_choice
from dsv3_jax.quantization import INT4, INT8, BlockQuantization, Quantization

Target = Literal["fp8", "bf16", "int8", "int4"]
TARGETS = ("fp8", "bf16", "int8", "int4")

_BASE_BYTES = 700_000_000  # a process with JAX, orbax and the tables of 92,000 tensors
_BYTES_PER_ELEMENT = 12  # of a piece: source, result, TensorStore's copy, and headroom


@dataclasses.dataclass(frozen=True)
class Unit:
    """Published tensors that are converted together, and the arrays they are written to."""

    array: StoredArray  # array of the weights
    scales: StoredArray | None  # scales that the conversion computes. None if it does not quantize.
    first: int  # index of the first expert. 0 for an array without experts.
    count: int  # number of experts. 1 for an array without experts.

    @property
    def key(self) -> str:
        """Identifier in the journal."""
        return f"{self.array.name}[{self.first}]" if self.array.stacked else self.array.name

    @property
    def arrays(self) -> tuple[StoredArray, ...]:
        """Arrays that the unit writes."""
        return (self.array,) if self.scales is None else (self.array, self.scales)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the published tensors, without scales."""
        return self.array.tensors[self.first : self.first + self.count]


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """A source whose headers are checked, and everything that its conversion will write."""

    directory: Path
    source: CheckpointReader
    source_config: ModelConfig  # config of the source, without MTP layers that its files lack
    to: Target
    config: ModelConfig  # config of the model in the form that the store will have
    keeps_bytes: bool  # whether the store will contain the same bytes for every tensor
    arrays: dict[str, StoredArray]
    units: tuple[Unit, ...]
    copies: dict[str, str]  # MTP layers' copies in the source -> the tensor that each must equal
    unused: tuple[str, ...]  # tensors that no model reads. The store keeps them outside its arrays.

    @property
    def source_bytes(self) -> int:
        """Size of the source's tensors."""
        return sum(map(nbytes, self.source.values()))

    @property
    def store_bytes(self) -> int:
        """Size of the store's arrays on disk."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def files(self) -> int:
        """Number of chunk files."""
        return sum(array.files for array in self.arrays.values())

    def inputs(self, unit: Unit) -> set[str]:
        """Returns the names of the published tensors that a unit reads, including scales."""
        names = set(unit.tensors)
        if self.keeps_bytes or (quantization := self.source_config.quantization) is None:
            return names
        return names | {n + quantization.scale_suffix for n in names}.intersection(self.source)

    def peak_bytes(self, workers: int) -> int:
        """Returns an upper bound on the resident memory of the conversion."""
        return _BASE_BYTES + workers * PIECE_ELEMENTS * _BYTES_PER_ELEMENT


def plan_conversion(directory: Path, to: Target) -> ConversionPlan:
    """Plans the conversion of a Hugging Face directory from its headers alone. Raises ValueError if
    the target is unknown, or the source is not a complete published checkpoint."""
    check_choice("to", to, TARGETS)
    if is_store(directory):
        raise ValueError(
            f"{directory}: expected a Hugging Face directory, got {describe(directory)}"
        )
    published = ModelConfig.from_hf(directory)
    source = CheckpointReader(directory)
    source_config = as_stored(published, source)
    check_tensors(source_config, source)
    config = _target_config(source_config, to)
    keeps_bytes = config == source_config
    recoding = Recoding(source_config.quantization, config.quantization, np.dtype(bfloat16))
    arrays = stored_arrays(
        config, multiple=recoding.row_multiple, unchanged=source if keeps_bytes else None
    )
    return ConversionPlan(
        directory=directory,
        source=source,
        source_config=source_config,
        to=to,
        config=config,
        keeps_bytes=keeps_bytes,
        arrays=arrays,
        units=_units(config, arrays, keeps_bytes),
        copies={c: original for c, original in copies(config).items() if c in source},
        unused=tuple(name for name in source if name.endswith(UNUSED_SUFFIXES)),
    )


def _target_config(config: ModelConfig, to: Target) -> ModelConfig:
    quantization: Quantization | None = {"bf16": None, "int8": INT8, "int4": INT4}.get(to)
    if to == "fp8":
        if config.quantization is not None:
            return config
        quantization = BlockQuantization()
    return dataclasses.replace(config, quantization=quantization, dtype="bfloat16")


def _units(
    config: ModelConfig, arrays: dict[str, StoredArray], keeps_bytes: bool
) -> tuple[Unit, ...]:
    quantization = config.quantization
    # Scales that the conversion computes belong to the unit of their weights.
    suffix = quantization.scale_suffix if quantization is not None and not keeps_bytes else None
    units = []
    for name, array in arrays.items():
        if suffix is not None and name.endswith("weight" + suffix):
            continue
        scales = arrays.get(name + suffix) if suffix is not None else None
        count = array.chunk[0] if array.stacked else 1
        units += [Unit(array, scales, e, count) for e in range(0, len(array.tensors), count)]
    return tuple(units)


def convert_unit(
    plan: ConversionPlan, unit: Unit, files: ArrayFiles, progress: Progress
) -> JournalLine:
    """Converts a unit chunk by chunk, and reads the result back. Returns the line for the journal,
    with the hashes of all tensors read and written, and the quantization error if there is one."""
    tensors = [
        _TensorConversion(plan, unit, expert, name)
        for expert, name in enumerate(unit.tensors, unit.first)
    ]
    shape, rows = unit.array.tensor_shape, unit.array.rows_per_chunk
    starts = range(0, shape[0], rows) if shape else (0,)
    for number, first in enumerate(starts):
        blocks = [tensor.convert(slice(first, first + rows)) for tensor in tensors]
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
    """Reads a unit's tensors from the store and returns their hashes by name."""
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
            stored, scale = recode(values, self._scale, rows.start, self._recoding, self._add_error)
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
