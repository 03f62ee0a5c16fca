"""Reads and writes safetensors files without the package under test, so that tests can damage them.

A file consists of eight bytes with the length of the header (little endian), a JSON header with the
dtype, shape and offsets of each tensor, and the bytes of all tensors end to end.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
}


@dataclass(frozen=True)
class Stored:
    """One tensor as it is stored in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> "Stored":
        spelling = next(name for name, dtype in DTYPES.items() if dtype == array.dtype)
        return cls(spelling, array.shape, array.tobytes())

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, DTYPES[self.dtype]).reshape(self.shape)

    def reshaped(self, *shape: int) -> "Stored":
        return replace(self, shape=shape)


Tensors = dict[str, Stored]


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """Returns the parsed header, without its metadata, and all bytes after it."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, content[8 + length :]


def join(path: Path, header: object, data: bytes) -> None:
    """Writes a file from any header, which is JSON or bytes, and any data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read(path: Path) -> Tensors:
    header, data = split(path)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), data[begin:end])
    return tensors


def read_directory(directory: Path) -> Tensors:
    """Returns all tensors of all safetensors files in a directory."""
    tensors: Tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= read(path)
    return tensors


def write(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Writes the tensors in the given order, without padding between them."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        place = [len(data), len(data) + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": place}
        data += tensor.data
    join(path, header, data)


def edit(path: Path, change: Callable[[Tensors], object]) -> None:
    """Rewrites one file after `change` altered its tensors in place."""
    tensors = read(path)
    change(tensors)
    write(path, tensors)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites the header of one file without changing the data."""
    header, data = split(path)
    change(header)
    join(path, header, data)
