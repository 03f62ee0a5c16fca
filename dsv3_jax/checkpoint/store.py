"""Reading a store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from dsv3_jax.checkpoint import manifest, sidecar
from dsv3_jax.checkpoint.array_files import ArrayFiles, TensorView
from dsv3_jax.checkpoint.parameter_names import stored_location
from dsv3_jax.checkpoint.safetensors_file import NUMPY

WEIGHTS = "weights"
"""Folder of a store with the arrays."""


class StoreReader(Mapping[str, TensorView]):
    """The tensors of a store by published name. Values are read on demand, chunk by chunk.

    Raises:
      ValueError: the store is incomplete, or its manifest is damaged.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.manifest = manifest.read(directory)
        self.config = self.manifest.model_config
        """The model in the form that the store has."""
        self.source = directory / sidecar.FOLDER
        """Directory with the source's small files, such as the tokenizer."""
        files = ArrayFiles(directory / WEIGHTS)
        self._tensors = {}
        for name, record in self.manifest.tensors.items():
            try:
                array, expert = stored_location(self.config, name)
            except (ValueError, IndexError):
                raise ValueError(
                    f"{directory / manifest.NAME}: expected the name of a tensor, got {name!r:.200}"
                ) from None
            shape, dtype = tuple(record.shape), NUMPY[record.dtype]
            self._tensors[name] = TensorView(files, array, expert, shape, dtype)

    def __getitem__(self, name: str) -> TensorView:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
