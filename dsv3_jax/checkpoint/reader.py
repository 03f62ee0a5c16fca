"""A checkpoint as Hugging Face writes it: safetensors files, the index of its shards, its tensors.

Headers are read at once, and values on demand. The safetensors package cannot return float8 tensors
as NumPy arrays. Values are read instead of memory-mapped, because a disk failure then raises
OSError. With a mapped file it would kill the process.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, TensorSpec, serialize_file

from dsv3_jax.files import check_file_name, naming
from dsv3_jax.words import first_and_count

DESCRIPTION_BYTES = 400  # upper bound of what index and header take for one tensor
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

NUMPY: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
"""Spelling in safetensors -> NumPy dtype."""
SPELLED = {dtype: name for name, dtype in NUMPY.items()}

_MAX_HEADER = 100_000_000  # bytes; the format's own limit


class FileArray:
    """A tensor in a file. Implements :class:`~dsv3_jax.checkpoint.arrays.LazyArray`."""

    __slots__ = ("_begin", "dtype", "file", "shape")

    def __init__(self, file: SafetensorsFile, entry: Mapping[str, Any]):
        self.file = file
        self.dtype = NUMPY[entry["dtype"]]
        self.shape: tuple[int, ...] = tuple(entry["shape"])
        self._begin: int = entry["data_offsets"][0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a tensor in a file is read, which is a copy")
        return self[...].astype(dtype or self.dtype, copy=False)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Reads all rows of the first axis that the index covers, and returns the indexed part."""
        index = index if isinstance(index, tuple) else (index,)
        if not self.shape or not index or index[0] is Ellipsis:
            return self._read(0, self.shape)[index]
        first, last, step = index[0].indices(self.shape[0])
        assert step == 1, "tensors are read in slices of step 1"
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        rows = self._read(first * row, (max(last - first, 0), *self.shape[1:]))
        return rows[(slice(None), *index[1:])]

    def _read(self, begin: int, shape: tuple[int, ...]) -> np.ndarray:
        out = np.empty(shape, self.dtype)
        self.file.read(self._begin + begin, out.reshape(-1).view(np.uint8).data)
        return out


class SafetensorsFile(dict[str, FileArray]):
    """The tensors of a file by name, in the order of the header. Raises ValueError if the file is
    not safetensors, has another size than its header implies, or an unsupported dtype."""

    def __init__(self, path: Path):
        self.path = path
        # Threads share the descriptor and read at explicit offsets.
        file = path.open("rb", buffering=0)
        weakref.finalize(self, file.close)
        self._descriptor = file.fileno()
        self.size = os.fstat(self._descriptor).st_size
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if self.size < 8 or length > min(self.size - 8, _MAX_HEADER):
            raise ValueError(
                f"{path.name}: truncated or not a safetensors file ({self.size} bytes)"
            )
        self.header = os.pread(self._descriptor, length, 8)
        entries = parsed_header(path, self.header)
        needed = 8 + len(self.header) + _end(path, entries)
        if self.size != needed:
            kind = "truncated" if self.size < needed else "damaged"
            raise ValueError(f"{path.name}: {kind}: expected {needed} bytes, got {self.size}")
        super().__init__({name: FileArray(self, entry) for name, entry in entries.items()})

    def read(self, begin: int, into: memoryview) -> None:
        """Fills ``into`` with data from byte ``begin`` after the header."""
        offset = 8 + len(self.header) + begin
        with naming(self.path):
            while into:
                if not (count := os.preadv(self._descriptor, [into], offset)):
                    raise OSError(0, "ended before its header said it would")
                offset, into = offset + count, into[count:]


def parsed_header(path: Path, header: bytes) -> dict[str, dict[str, Any]]:
    """Returns the entry of each tensor, in the order of the header. Raises ValueError, naming
    ``path``, if the header is not valid JSON, a dtype is unsupported, a shape disagrees with its
    offsets, or there are gaps between tensors."""
    try:
        entries = json.loads(header, object_pairs_hook=lambda pairs: _unique_keys(path, pairs))
    except _DuplicateKeyError:
        raise
    except (ValueError, RecursionError):
        raise ValueError(f"{path.name}: its safetensors header is not valid JSON") from None
    if not isinstance(entries, dict):
        raise ValueError(f"{path.name}: its safetensors header is not a JSON object")
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        _check_entry(path, name, entry)
    _end(path, entries)
    return entries


class _DuplicateKeyError(ValueError):
    """An object in the header has the same key twice."""


def _unique_keys(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in unique if keys.count(key) > 1)
        raise _DuplicateKeyError(
            f"{path.name}: its safetensors header has {repeated} more than once"
        )
    return unique


def _end(path: Path, entries: Mapping[str, Mapping[str, Any]]) -> int:
    """Returns the size of the data. The format allows no gap between tensors."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, next_begin = entry["data_offsets"]
        if begin != end:
            raise ValueError(
                f"{path.name}: {name}: expected data_offsets that begin at {end}, got {begin}"
            )
        end = next_begin
    return end


def _check_entry(path: Path, name: str, entry: object) -> None:
    """Checks the entry of one tensor: its dtype, shape, and the offsets of its bytes."""
    if not (
        isinstance(entry, dict)
        and isinstance(entry.get("dtype"), str)
        and are_sizes(entry.get("shape"))
        and are_sizes(entry.get("data_offsets"))
        and len(entry["data_offsets"]) == 2
    ):
        raise ValueError(
            f"{path.name}: {name}: expected dtype, shape and two data_offsets, got {entry!r:.200}"
        )
    if entry["dtype"] not in NUMPY:
        raise ValueError(
            f"{path.name}: {name}: expected a dtype among {', '.join(NUMPY)}; "
            f"got {entry['dtype']!r}"
        )
    dtype = NUMPY[entry["dtype"]]
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(entry["shape"]) * dtype.itemsize:
        raise ValueError(
            f"{path.name}: {name}: {end - begin} bytes do not hold {dtype} {entry['shape']}"
        )


def are_sizes(value: object) -> bool:
    """Returns whether a JSON value is a list of integers that are not negative."""
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def header_of(tensors: Mapping[str, Any]) -> bytes:
    """Returns the header of a file with consecutive tensors, given by name with the attributes
    ``dtype`` (spelled as in safetensors), ``shape`` and ``nbytes``."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in tensors.items():
        begin, end = end, end + spec.nbytes
        entries[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a file that transformers can read. The package determines the order of tensors."""
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=array.dtype.name,
            shape=list(array.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in arrays.items()
    }
    with path.open("wb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        serialize_file(specs, path, {"format": "pt"})
    except SafetensorError as error:
        if (code := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None
    path.chmod(mode)  # the package makes it readable only for its owner


def shard_name(number: int, count: int) -> str:
    """Returns the file name of shard ``number``, counted from 1, out of ``count``."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def index_content(shards: Mapping[str, Iterable[str]], total_size: int) -> dict[str, Any]:
    """Returns the content of the index."""
    weight_map = {tensor: file for file, tensors in shards.items() for tensor in tensors}
    return {"metadata": {"total_size": total_size}, "weight_map": weight_map}


def json_text(content: object) -> str:
    """Formats the content of config.json or of an index."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


class CheckpointReader(dict[str, FileArray]):
    """The tensors of a Hugging Face directory by published name. Values are read on demand. A
    weight and its scale may be in different shards.

    Raises:
      ValueError: the directory has no checkpoint, a shard is missing, truncated or damaged, or a
        tensor is not in the file that the index names.
    """

    def __init__(self, directory: Path):
        if (index := directory / INDEX).is_file():
            super().__init__(_sharded(directory, weight_map(index)))
        elif (single := directory / SINGLE).is_file():
            super().__init__(SafetensorsFile(single))
        else:
            raise ValueError(f"{directory}: expected {INDEX} or {SINGLE}, found neither")


def weight_map(index: Path) -> dict[str, str]:
    """Returns the name of each tensor's file, which is in the index's directory. Raises ValueError
    if the index is damaged, or contains a value that is not a plain file name."""
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
