"""Checkpoints of any size as sparse files, with correct headers and holes for most of the values.

Names and shapes come from `tensor_shapes`, so that nothing depends on the package under test.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .checkpoints import Config, is_float32, is_fp8, tensor_shapes

ITEMSIZE = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
BLOCK = 128

Entry = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor."""


def entries(config: Config) -> dict[str, Entry]:
    """Returns every tensor of a published checkpoint, each scale of float8 after its weight."""
    out: dict[str, Entry] = {}
    for name, shape in tensor_shapes(config).items():
        if is_fp8(name) and "quantization_config" in config:
            out[name] = ("F8_E4M3", shape)
            scales = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
            out[f"{name}_scale_inv"] = ("F32", scales)
        else:
            out[name] = ("F32" if is_float32(name, config) else "BF16", shape)
    return out


def nbytes(entry: Entry) -> int:
    return math.prod(entry[1]) * ITEMSIZE[entry[0]]


def write_sparse_checkpoint(
    directory: Path, config: Config, shards: int, values: Mapping[str, np.ndarray] | None = None
) -> None:
    """Writes shards of about equal size. A scale is in the shard after its weight's.

    `config` is written unchanged. It is of a float8 checkpoint if it contains the
    quantization_config, else of a bfloat16 one. `values` are those of some of its tensors, in their
    stored dtype.
    """
    tensors = entries(config)
    total, written = sum(map(nbytes, tensors.values())), 0
    files: list[dict[str, Entry]] = [{} for _ in range(shards)]
    for name, entry in tensors.items():
        shard = written * shards // total
        if name.endswith("_scale_inv"):
            shard = (shard + 1) % shards
        files[shard][name] = entry
        written += nbytes(entry)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    for number, content in enumerate(files, 1):
        shard_name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        _write_file(directory / shard_name, content, values or {})
        weight_map |= dict.fromkeys(content, shard_name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_file(path: Path, content: dict[str, Entry], values: Mapping[str, np.ndarray]) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in content.items():
        begin, end = end, end + nbytes((dtype, shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for name in content.keys() & values.keys():
            assert values[name].nbytes == nbytes(content[name])
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(values[name].tobytes())
