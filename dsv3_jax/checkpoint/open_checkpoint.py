"""Opening a checkpoint of either kind. Reads headers, but no values."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from dsv3_jax.checkpoint.arrays import Arrays
from dsv3_jax.checkpoint.check import as_stored, tensor_kind
from dsv3_jax.checkpoint.find import find
from dsv3_jax.checkpoint.kinds import is_store
from dsv3_jax.checkpoint.manifest import Manifest
from dsv3_jax.checkpoint.reader import SPELLED, CheckpointReader
from dsv3_jax.checkpoint.store import StoreReader
from dsv3_jax.checkpoint.tensor_table import STORED_AS, tensor_table
from dsv3_jax.config import ModelConfig

T = TypeVar("T")

_FLOATS = ("F64", "F32", *STORED_AS.values())


class OpenCheckpoint(NamedTuple):
    """A Hugging Face directory or a store, with its headers read."""

    directory: Path
    config: ModelConfig  # config without MTP layers that the files lack
    arrays: Arrays  # tensors by published name
    manifest: Manifest | None  # manifest of a store. None for a Hugging Face directory.

    def readable_weights(self) -> list[str]:
        """Returns the names of the tensors whose values can be computed, in the order data flows:
        they have the shape and form that the config requires, and a scale if they are quantized.
        Scales themselves are not listed."""
        table = tensor_table(self.config)
        quantization = self.config.quantization
        scales = {n + quantization.scale_suffix for n in table} if quantization else set()
        names = []
        for name, spec in table.items():
            if name in scales or not self._has(name, spec.shape):
                continue
            dtype = SPELLED[self.arrays[name].dtype]
            scale = name + quantization.scale_suffix if quantization else ""
            if scale not in table:
                is_readable = spec.dtype in _FLOATS and dtype in _FLOATS
            else:
                is_readable = dtype == spec.dtype and self._has(scale, table[scale].shape)
            if is_readable:
                names.append(name)
        return names

    def _has(self, name: str, shape: tuple[int, ...]) -> bool:
        return name in self.arrays and self.arrays[name].shape == shape


def open_checkpoint(path_or_name: str | os.PathLike[str]) -> OpenCheckpoint:
    """Opens a checkpoint, as :func:`~dsv3_jax.checkpoint.find.find` finds it, and reads its
    headers. Raises ValueError if there is none, or its headers cannot be read."""
    directory = find(path_or_name)
    if is_store(directory):
        store = StoreReader(directory)
        return OpenCheckpoint(directory, store.config, store, store.manifest)
    published = ModelConfig.from_hf(directory)
    arrays = CheckpointReader(directory)
    return OpenCheckpoint(directory, as_stored(published, arrays), arrays, None)


def group_by_kind(config: ModelConfig, by_name: Mapping[str, T]) -> dict[str, dict[int, list[T]]]:
    """Groups values by tensor kind, a name without numbers and ``.weight`` such as
    ``layers.mlp.experts.gate_proj``, then by layer. MTP layers, which continue the numbering, have
    kinds such as ``mtp.mlp.experts.gate_proj``. Tensors outside all layers have layer -1."""
    groups: dict[str, dict[int, list[T]]] = {}
    for name, value in by_name.items():
        kind, layer = tensor_kind(name).removesuffix(".weight"), -1
        if (match := re.match(r"model\.layers\.(\d+)\.", name)) is not None:
            layer = int(match[1])
        if layer >= config.num_hidden_layers:
            kind = kind.replace("layers.", "mtp.", 1)
        groups.setdefault(kind, {}).setdefault(layer, []).append(value)
    return groups
