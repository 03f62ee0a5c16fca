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
        except ValueError:
            raise ValueError(f"{path.name}: its safetensors header is not valid JSON") from None
    header.pop("__metadata__", None)
    start = 8 + length
    needed = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != needed:
        kind = "truncated" if size < needed else "damaged"
        raise ValueError(f"{path.name}: {kind}: expected {needed} bytes, got {size}")
    data = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
    return {name: _view(path, name, entry, data[start:]) for name, entry in header.items()}


def _view(path: Path, name: str, entry: Mapping, data: np.ndarray) -> np.ndarray:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(
            f"{path.name}: {name}: expected a dtype among {', '.join(_DTYPES)}; "
            f"got {entry['dtype']}"
        )
    dtype, _ = _DTYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{path.name}: {name}: {end - begin} bytes do not hold {dtype} {shape}")
    return data[begin:end].view(dtype).reshape(shape)


def write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes the tensors, in the order given, as transformers expects them."""
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
