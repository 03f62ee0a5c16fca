"""A Hugging Face directory as one lazy mapping: name -> tensor, whichever file holds it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from dsv3_jax.checkpoint.safetensors_file import read_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointReader(Mapping[str, np.ndarray]):
    """The tensors of a directory, by published name.

    With an index, every shard it names must be there before anything is read; a shard is mapped
    when a tensor of it is first asked for. A weight and its scale may sit in different shards.

    Raises:
      ValueError: no checkpoint, a shard that is missing, truncated or damaged, or a tensor that is
        not where the index says.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._files: dict[str, dict[str, np.ndarray]] = {}
        index = directory / INDEX
        if index.is_file():
            try:
                self._shard_of: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{INDEX}: expected JSON with a weight_map") from None
            shards = sorted(set(self._shard_of.values()))
            if missing := [s for s in shards if not (directory / s).is_file()]:
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                raise ValueError(
                    f"{directory}: {INDEX} names {len(shards)} shards; missing: {missing[0]}{more}"
                )
        elif (directory / SINGLE).is_file():
            self._shard_of = dict.fromkeys(self._file(SINGLE), SINGLE)
        else:
            raise ValueError(f"{directory}: expected {INDEX} or {SINGLE}, found neither")

    def _file(self, shard: str) -> dict[str, np.ndarray]:
        if shard not in self._files:
            self._files[shard] = read_file(self.directory / shard)
        return self._files[shard]

    def __getitem__(self, name: str) -> np.ndarray:
        shard = self._shard_of[name]
        tensors = self._file(shard)
        if name not in tensors:
            raise ValueError(f"{shard}: lacks {name}, which the index places there")
        return tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._shard_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def __len__(self) -> int:
        return len(self._shard_of)
