"""A converted store, read: its tensors by published name, whatever form they have there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from dsv3_jax.checkpoint import manifest, sidecar
from dsv3_jax.checkpoint.array_files import ArrayFiles, TensorView
from dsv3_jax.checkpoint.parameter_names import stored_location
from dsv3_jax.checkpoint.safetensors_file import NUMPY

WEIGHTS = "weights"


class StoreReader(Mapping[str, TensorView]):
    """The tensors of a store; their values are read when asked for, chunk by chunk.

    Raises:
      ValueError: the store is not whole, or its manifest is damaged.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.manifest = manifest.read(directory)
        self.config = self.manifest.model_config
        self.source = directory / sidecar.FOLDER
        files = ArrayFiles(directory / WEIGHTS)
        self._tensors = {}
        for name, tensor in self.manifest.tensors.items():
            try:
                array, expert = stored_location(self.config, name)
            except (ValueError, IndexError):
                raise ValueError(
                    f"{directory / manifest.NAME}: expected the name of a tensor, got {name!r:.200}"
                ) from None
            shape, dtype = tuple(tensor.shape), NUMPY[tensor.dtype]
            self._tensors[name] = TensorView(files, array, expert, shape, dtype)

    def __getitem__(self, name: str) -> TensorView:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
