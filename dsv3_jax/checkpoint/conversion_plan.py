"""What a conversion will do, from headers alone: arrays, units of work, bytes, memory."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
from ml_dtypes import bfloat16

from dsv3_jax.checkpoint.arrays import PIECE_ELEMENTS
from dsv3_jax.checkpoint.check import check_tensors, with_layers_present
from dsv3_jax.checkpoint.formats import Forms
from dsv3_jax.checkpoint.kinds import describe, is_store
from dsv3_jax.checkpoint.reader import CheckpointReader
from dsv3_jax.checkpoint.stored_arrays import StoredArray, stored_arrays
from dsv3_jax.checkpoint.tensor_table import UNUSED_SUFFIXES, copies
from dsv3_jax.config import ModelConfig
from dsv3_jax.field_checks import check_choice
from dsv3_jax.quantization import INT4, INT8, BlockQuantization, Quantization

Target = Literal["fp8", "bf16", "int8", "int4"]
TARGETS = ("fp8", "bf16", "int8", "int4")

_BASE_BYTES = 700_000_000  # of a process with JAX, orbax and the tables of 92,000 tensors
_BYTES_AN_ELEMENT = 12  # of a piece at work: source, result, TensorStore's copy, and headroom


@dataclasses.dataclass(frozen=True)
class Unit:
    """Published tensors that are converted together, and the arrays they go to."""

    array: StoredArray
    scales: StoredArray | None
    """Scales that the conversion makes."""
    first: int
    count: int
    """Experts from ``first`` on; of an array without experts, its one tensor."""

    @property
    def key(self) -> str:
        return f"{self.array.name}[{self.first}]" if self.array.stacked else self.array.name

    @property
    def arrays(self) -> tuple[StoredArray, ...]:
        return (self.array,) if self.scales is None else (self.array, self.scales)

    @property
    def tensors(self) -> tuple[str, ...]:
        return self.array.tensors[self.first : self.first + self.count]


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """A checked source and what becomes of it."""

    directory: Path
    source: CheckpointReader
    source_config: ModelConfig
    to: Target
    config: ModelConfig
    """In the form that the store will hold."""
    keeps: bool
    """Every tensor's bytes are kept."""
    arrays: dict[str, StoredArray]
    units: tuple[Unit, ...]
    copies: dict[str, str]
    """The copies of embedding and head that the source has, and what each must repeat."""
    unused: tuple[str, ...]
    """Tensors that no model reads; kept beside the arrays."""

    @property
    def source_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.source.values())

    @property
    def store_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def files(self) -> int:
        """Of array data, in the store."""
        return sum(array.files for array in self.arrays.values())

    def read_for(self, unit: Unit) -> set[str]:
        """Names of the published tensors that a unit is made from, scales among them."""
        names = set(unit.tensors)
        if self.keeps or (quantization := self.source_config.quantization) is None:
            return names
        return names | {n + quantization.scale_suffix for n in names}.intersection(self.source)

    def peak_bytes(self, workers: int) -> int:
        """Resident memory that the conversion stays below."""
        return _BASE_BYTES + workers * PIECE_ELEMENTS * _BYTES_AN_ELEMENT


def plan_conversion(directory: Path, to: Target) -> ConversionPlan:
    """Reads every header, no values.

    Raises:
      ValueError: an unknown target, or a source that is not a whole published checkpoint.
    """
    check_choice("to", to, TARGETS)
    if is_store(directory):
        raise ValueError(
            f"{directory}: expected a Hugging Face directory, got {describe(directory)}"
        )
    published = ModelConfig.from_hf(directory)
    source = CheckpointReader(directory)
    source_config = with_layers_present(published, source)
    check_tensors(source_config, source)
    config = _target_config(source_config, to)
    keeps = config == source_config
    forms = Forms(source_config.quantization, config.quantization, np.dtype(bfloat16))
    arrays = stored_arrays(config, multiple=forms.rows, kept=source if keeps else None)
    return ConversionPlan(
        directory=directory,
        source=source,
        source_config=source_config,
        to=to,
        config=config,
        keeps=keeps,
        arrays=arrays,
        units=_units(config, arrays, keeps),
        copies={c: original for c, original in copies(config).items() if c in source},
        unused=tuple(name for name in source if name.endswith(UNUSED_SUFFIXES)),
    )


def free_bytes(directory: Path) -> int:
    """Of the disk that a directory is on, or will be."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def _target_config(config: ModelConfig, to: Target) -> ModelConfig:
    quantization: Quantization | None = {"bf16": None, "int8": INT8, "int4": INT4}.get(to)
    if to == "fp8":
        if config.quantization is not None:
            return config
        quantization = BlockQuantization()
    return dataclasses.replace(config, quantization=quantization, dtype="bfloat16")


def _units(config: ModelConfig, arrays: dict[str, StoredArray], keeps: bool) -> tuple[Unit, ...]:
    suffix = config.quantization.scale_suffix if config.quantization is not None else None
    units = []
    for name, array in arrays.items():
        if not keeps and suffix is not None and name.endswith("weight" + suffix):
            continue  # goes with its weight
        scales = arrays.get(name + suffix) if not keeps and suffix is not None else None
        count = array.chunk[0] if array.stacked else 1
        units += [Unit(array, scales, e, count) for e in range(0, len(array.tensors), count)]
    return tuple(units)
