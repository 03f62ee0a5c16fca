"""safetensors files as read-only memory maps, float8 included.

The safetensors package hands tensors to NumPy by NumPy's own dtypes and so cannot return bfloat16's
younger relatives; here a tensor is a view of the mapped file, and costs no memory until it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import TensorSpec, serialize_file

# safetensors' spelling -> (NumPy dtype, the package's spelling when writing)
_DTYPES: dict[str, tuple[np.dtype, str]] = {
    "F64": (np.dtype(np.float64), "float64"),
    "F32": (np.dtype(np.float32), "float32"),
    "F16": (np.dtype(np.float16), "float16"),
    "BF16": (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
    "F8_E4M3": (np.dtype(ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
    "F8_E8M0": (np.dtype(ml_dtypes.float8_e8m0fnu), "float8_e8m0fnu"),
    "I64": (np.dtype(np.int64), "int64"),
    "I32": (np.dtype(np.int32), "int32"),
    "U8": (np.dtype(np.uint8), "uint8"),
}
_SPELLINGS = dict(_DTYPES.values())

_MAX_HEADER = 100_000_000  # bytes; the format's own limit


def read_file(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of the file by name, as views of the mapped file.

    Raises:
      ValueError: the file is not safetensors, is shorter or longer than its header says, or holds
        a dtype that this code does not know.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"{path.name}: truncated or not a safetensors file ({size} bytes)")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise ValueError(f"{path.name}: its safetensors header is not valid JSON") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path.name}: its safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        _check_entry(path, name, entry)
    # The format's own rule: in the order of their offsets, tensors fill the file without a gap.
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, next_begin = entry["data_offsets"]
        if begin != end:
            raise ValueError(
                f"{path.name}: {name}: expected data_offsets that begin at {end}, got {begin}"
            )
        end = next_begin
    needed = 8 + length + end
    if size != needed:
        kind = "truncated" if size < needed else "damaged"
        raise ValueError(f"{path.name}: {kind}: expected {needed} bytes, got {size}")
    # As a plain array: slicing a memmap costs three times as much, and files have many tensors.
    data = np.asarray(np.memmap(path, np.uint8, "r"))[8 + length :]
    return {name: _view(entry, data) for name, entry in header.items()}


def _check_entry(path: Path, name: str, entry: object) -> None:
    """One tensor's entry: known dtype, a shape, and offsets that hold just that many bytes."""
    if not (
        isinstance(entry, dict)
        and isinstance(entry.get("dtype"), str)
        and _are_sizes(entry.get("shape"))
        and _are_sizes(entry.get("data_offsets"))
        and len(entry["data_offsets"]) == 2
    ):
        raise ValueError(
            f"{path.name}: {name}: expected dtype, shape and two data_offsets, got {entry!r:.200}"
        )
    if entry["dtype"] not in _DTYPES:
        raise ValueError(
            f"{path.name}: {name}: expected a dtype among {', '.join(_DTYPES)}; "
            f"got {entry['dtype']!r}"
        )
    dtype, _ = _DTYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(entry["shape"]) * dtype.itemsize:
        raise ValueError(
            f"{path.name}: {name}: {end - begin} bytes do not hold {dtype} {entry['shape']}"
        )


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _view(entry: Mapping, data: np.ndarray) -> np.ndarray:
    dtype, _ = _DTYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    return data[begin:end].view(dtype).reshape(entry["shape"])


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes the tensors as transformers expects them; the package decides on their order."""
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=_SPELLINGS[array.dtype],
            shape=list(array.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in arrays.items()
    }
    serialize_file(specs, path, {"format": "pt"})
    path.chmod(0o644)  # the package makes it readable by its owner alone
