"""A checkpoint as Hugging Face writes it: the index of its shards, and reading of its tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dsv3_jax.checkpoint.messages import first_and_count
from dsv3_jax.checkpoint.safetensors_file import FileArray, SafetensorsFile
from dsv3_jax.files import check_file_name

DESCRIPTION_BYTES = 400
"""Upper bound of what the index and the header of a file take for one tensor."""


def shard_name(number: int, count: int) -> str:
    """Returns the file name of shard ``number``, counted from 1, out of ``count``."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def index_content(shards: Mapping[str, Iterable[str]], total_size: int) -> dict[str, Any]:
    """Returns the content of the index.

    Args:
      shards: names of the tensors in each file.
      total_size: size of all tensors in bytes.
    """
    weight_map = {tensor: file for file, tensors in shards.items() for tensor in tensors}
    return {"metadata": {"total_size": total_size}, "weight_map": weight_map}


def json_text(content: object) -> str:
    """Formats the content of config.json or of an index."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


INDEX = "model.safetensors.index.json"
"""Name of the index of a sharded checkpoint."""
SINGLE = "model.safetensors"
"""Name of the only file of a checkpoint without index."""


class CheckpointReader(Mapping[str, FileArray]):
    """The tensors of a Hugging Face directory by published name. Values are read on demand.

    The constructor checks that every file is complete. A weight and its scale may be in different
    shards.

    Raises:
      ValueError: the directory has no checkpoint, a shard is missing, truncated or damaged, or a
        tensor is not in the file that the index names.
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
    """Reads an index. Returns the name of each tensor's file in the same directory.

    Raises:
      ValueError: the index is damaged, or contains a value that is not a plain file name.
    """
    try:
        content = json.loads(index.read_text("utf-8"))
    except (ValueError, RecursionError):
        content = None
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict):
        raise ValueError(f"{INDEX}: expected JSON with a weight_map")
    for name, file in files.items():
        check_file_name(file, f"{INDEX}: {name}", ".safetensors")
    return files


def _sharded(directory: Path, shard_of: Mapping[str, str]) -> dict[str, FileArray]:
    shards = sorted(set(shard_of.values()))
    if missing := [s for s in shards if not (directory / s).is_file()]:
        raise ValueError(
            f"{directory}: {INDEX} names {len(shards)} shards; missing: {first_and_count(missing)}"
        )
    files = {shard: SafetensorsFile(directory / shard) for shard in shards}
    for name, shard in shard_of.items():
        if name not in files[shard]:
            raise ValueError(f"{shard}: lacks {name}, which the index places there")
    for shard, file in files.items():
        for name in file:
            if (indexed := shard_of.get(name, shard)) != shard:
                raise ValueError(f"{shard}: holds {name}, which the index places in {indexed}")
    return {name: files[shard][name] for name, shard in shard_of.items()}
