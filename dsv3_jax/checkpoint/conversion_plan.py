"""The plan of a conversion, made from headers alone: arrays, units of work, bytes, memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np
from ml_dtypes import bfloat16

from dsv3_jax.checkpoint.arrays import PIECE_ELEMENTS
from dsv3_jax.checkpoint.check import as_stored, check_tensors
from dsv3_jax.checkpoint.formats import Recoding
from dsv3_jax.checkpoint.kinds import describe, is_store
from dsv3_jax.checkpoint.reader import CheckpointReader
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

    array: StoredArray
    """Array of the weights."""
    scales: StoredArray | None
    """Array of the scales that the conversion computes. None if it does not quantize the array."""
    first: int
    """Index of the first expert. 0 for an array without experts."""
    count: int
    """Number of experts. 1 for an array without experts."""

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
    """Directory of the source."""
    source: CheckpointReader
    """Tensors of the source."""
    source_config: ModelConfig
    """Config of the source, without MTP layers that its files lack."""
    to: Target
    """Requested target."""
    config: ModelConfig
    """Config of the model in the form that the store will have."""
    keeps_bytes: bool
    """Whether the store will contain the same bytes for every tensor."""
    arrays: dict[str, StoredArray]
    """Arrays of the store by name."""
    units: tuple[Unit, ...]
    """Units of work."""
    copies: dict[str, str]
    """MTP layers' copies in the source -> the tensor that each must equal."""
    unused: tuple[str, ...]
    """Tensors that no model reads. The store keeps them outside its arrays."""

    @property
    def source_bytes(self) -> int:
        """Size of the source's tensors."""
        return sum(tensor.nbytes for tensor in self.source.values())

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
    """Plans the conversion of a Hugging Face directory. Reads all headers, but no values.

    Raises:
      ValueError: the target is unknown, or the source is not a complete published checkpoint.
    """
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
