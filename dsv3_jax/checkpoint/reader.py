"""A Hugging Face directory as one lazy mapping: name -> tensor, whichever file holds it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from dsv3_jax.checkpoint.safetensors_file import FileArray, SafetensorsFile
from dsv3_jax.files import check_file_name

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointReader(Mapping[str, FileArray]):
    """The tensors of a directory, by published name; their values are read when asked for.

    Every file is there and whole before this returns. A weight and its scale may sit in different
    shards.

    Raises:
      ValueError: no checkpoint, a shard that is missing, truncated or damaged, or a tensor that is
        not where the index says.
    """

    def __init__(self, directory: Path):
        if (index := directory / INDEX).is_file():
            self._tensors = _sharded(directory, weight_map(index))
        elif (single := directory / SINGLE).is_file():
            self._tensors = dict(SafetensorsFile(single))
        else:
            raise ValueError(f"{directory}: expected {INDEX} or {SINGLE}, found neither")

    def __getitem__(self, name: str) -> FileArray:
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> name of the file that holds it, beside the index.

    Raises:
      ValueError: the index is damaged, or names something else than a file beside it.
    """
    try:
        content = json.loads(index.read_text("utf-8"))
    except (ValueError, RecursionError):
        content = None
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise ValueError(f"{INDEX}: expected JSON with a weight_map")
    for name, shard in found.items():
        check_file_name(shard, f"{INDEX}: {name}", ".safetensors")
    return found


def _sharded(directory: Path, shard_of: Mapping[str, str]) -> dict[str, FileArray]:
    shards = sorted(set(shard_of.values()))
    if missing := [s for s in shards if not (directory / s).is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"{directory}: {INDEX} names {len(shards)} shards; missing: {missing[0]}{more}"
        )
    files = {shard: SafetensorsFile(directory / shard) for shard in shards}
    for name, shard in shard_of.items():
        if name not in files[shard]:
            raise ValueError(f"{shard}: lacks {name}, which the index places there")
    for shard, file in files.items():
        for name in file:
            if (place := shard_of.get(name, shard)) != shard:
                raise ValueError(f"{shard}: holds {name}, which the index places in {place}")
    return {name: files[shard][name] for name, shard in shard_of.items()}
