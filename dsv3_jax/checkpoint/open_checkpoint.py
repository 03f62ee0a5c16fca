"""A checkpoint in whichever form it has, its headers read and no values."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from dsv3_jax.checkpoint.arrays import Arrays
from dsv3_jax.checkpoint.check import tensor_kind, with_layers_present
from dsv3_jax.checkpoint.find import find
from dsv3_jax.checkpoint.kinds import is_store
from dsv3_jax.checkpoint.manifest import Manifest
from dsv3_jax.checkpoint.reader import CheckpointReader
from dsv3_jax.checkpoint.safetensors_file import SPELLED
from dsv3_jax.checkpoint.store import StoreReader
from dsv3_jax.checkpoint.tensor_table import STORED_AS, tensor_table
from dsv3_jax.config import ModelConfig

T = TypeVar("T")

_FLOATS = ("F64", "F32", *STORED_AS.values())


class OpenCheckpoint(NamedTuple):
    """A Hugging Face directory or a store."""

    directory: Path
    config: ModelConfig
    """Without MTP layers that the files do not have."""
    arrays: Arrays
    manifest: Manifest | None
    """Of a store."""

    def with_values(self) -> list[str]:
        """Tensors whose values can be told, in the order data flows: those that are as the config
        says, but for scales, which belong to their weights."""
        table = tensor_table(self.config)
        quantization = self.config.quantization
        scales = {n + quantization.scale_suffix for n in table} if quantization else set()
        out = []
        for name, spec in table.items():
            if name in scales or not self._has(name, spec.shape):
                continue
            dtype = SPELLED[self.arrays[name].dtype]
            scale = name + quantization.scale_suffix if quantization else ""
            if scale not in table:
                good = spec.dtype in _FLOATS and dtype in _FLOATS
            else:
                good = dtype == spec.dtype and self._has(scale, table[scale].shape)
            if good:
                out.append(name)
        return out

    def _has(self, name: str, shape: tuple[int, ...]) -> bool:
        return name in self.arrays and self.arrays[name].shape == shape


def open_checkpoint(path_or_name: str | os.PathLike[str]) -> OpenCheckpoint:
    """
    Args:
      path_or_name: of a Hugging Face directory or a store; ``"demo"`` or a Hub name.

    Raises:
      ValueError: no checkpoint there, or one whose headers cannot be read.
    """
    directory = find(path_or_name)
    if is_store(directory):
        store = StoreReader(directory)
        return OpenCheckpoint(directory, store.config, store, store.manifest)
    published = ModelConfig.from_hf(directory)
    arrays = CheckpointReader(directory)
    return OpenCheckpoint(directory, with_layers_present(published, arrays), arrays, None)


def group_by_kind(config: ModelConfig, of_each: Mapping[str, T]) -> dict[str, dict[int, list[T]]]:
    """What there is of each tensor, by kind and layer; -1 is the layer of what is in none.

    A kind is a name without numbers and ``.weight``: ``layers.mlp.experts.gate_proj``, and
    ``mtp.mlp.experts.gate_proj`` in MTP layers, which continue the numbering.
    """
    out: dict[str, dict[int, list[T]]] = {}
    for name, figures in of_each.items():
        kind, layer = tensor_kind(name).removesuffix(".weight"), -1
        if (match := re.match(r"model\.layers\.(\d+)\.", name)) is not None:
            layer = int(match[1])
        if layer >= config.num_hidden_layers:
            kind = kind.replace("layers.", "mtp.", 1)
        out.setdefault(kind, {}).setdefault(layer, []).append(figures)
    return out
