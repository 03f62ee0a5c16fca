"""Functions that harm the files of a source."""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.checkpoint import files
from tests.checkpoint.files import CONFIG, INDEX, Stored, Tensors

FIRST, SECOND, THIRD = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
NORM = "model.layers.0.input_layernorm.weight"
KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"  # [40, 64], in blocks of [16, 40]
KV_A_SCALE = f"{KV_A}_scale_inv"  # [3, 2]
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
EXPERTS = "model.layers.1.mlp.experts"
EXPERT = f"{EXPERTS}.2.up_proj.weight"
LAST_EXPERT = f"{EXPERTS}.3"
MTP = "model.layers.2"
BLOCK = (16, 40)

Harm = Callable[[Path], object]


def holder(directory: Path, name: str) -> Path:
    """Returns the shard that contains the tensor."""
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][name]


def file_content(file: str, change: Callable[[bytes], bytes]) -> Harm:
    def harm(directory: Path) -> None:
        (directory / file).write_bytes(change((directory / file).read_bytes()))

    return harm


def header_length(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


def entry(name: str, change: Callable[[dict], object]) -> Harm:
    """Returns a change of one tensor's entry in the header of its file."""
    return lambda directory: files.edit_header(
        holder(directory, name), lambda header: change(header[name])
    )


def relabelled(name: str, dtype: str) -> Harm:
    return entry(name, lambda fields: fields.update(dtype=dtype))


def reshaped(name: str, *shape: int) -> Harm:
    return entry(name, lambda fields: fields.update(shape=shape))


def tensor(name: str, change: Callable[[Stored], Stored]) -> Harm:
    """Returns a replacement of one tensor."""

    def harm(directory: Path) -> None:
        def apply(tensors: Tensors) -> None:
            tensors[name] = change(tensors[name])

        files.edit(holder(directory, name), apply)

    return harm


def value(name: str, number: object) -> Harm:
    """Returns a change of one value in the last row."""

    def change(stored: Stored) -> Stored:
        array = stored.array.copy()
        array.reshape(-1)[-2:-1] = number
        return Stored.of(array)

    return tensor(name, change)


def code(name: str, byte: int) -> Harm:
    """Returns a change of one float8 value, given by its bits."""
    return value(name, np.array([byte], np.uint8).view(ml_dtypes.float8_e4m3fn))


def lost(condition: Callable[[str], bool]) -> Harm:
    """Removes tensors from files and index, as if they had never existed."""

    def harm(directory: Path) -> None:
        names = [name for name in files.read_directory(directory) if condition(name)]
        assert names
        for name in names:
            files.edit(holder(directory, name), lambda tensors, name=name: tensors.pop(name))
        index(lambda weight_map: [weight_map.pop(name) for name in names])(directory)

    return harm


def added(new: dict[str, Stored], shard: str = SECOND) -> Harm:
    """Adds tensors to file and index."""

    def harm(directory: Path) -> None:
        files.edit(directory / shard, lambda tensors: tensors.update(new))
        index(lambda weight_map: weight_map.update(dict.fromkeys(new, shard)))(directory)

    return harm


def index(change: Callable[[dict[str, str]], object]) -> Harm:
    return lambda directory: files.edit_json(
        directory / INDEX, lambda content: change(content["weight_map"])
    )


def config(**changes: object) -> Harm:
    return lambda directory: files.edit_json(
        directory / CONFIG, lambda content: content.update(changes)
    )


def config_without(key: str) -> Harm:
    return lambda directory: files.edit_json(directory / CONFIG, lambda content: content.pop(key))


def quantization(**changes: object) -> Harm:
    return lambda directory: files.edit_json(
        directory / CONFIG, lambda content: content["quantization_config"].update(changes)
    )


def duplicate_key(directory: Path) -> None:
    """Repeats a name in a header, with two valid entries."""
    path = holder(directory, NORM)
    header, data = files.split(path)
    again = json.dumps({NORM: header[NORM]})[1:-1].encode()
    files.join(path, json.dumps(header)[:-1].encode() + b", " + again + b"}", data)


def in_two_shards(directory: Path) -> None:
    stored = files.read(holder(directory, NORM))[NORM]
    other = next(file for file in (FIRST, SECOND) if directory / file != holder(directory, NORM))
    files.edit(directory / other, lambda tensors: tensors.update({NORM: stored}))


def shared_place(directory: Path) -> None:
    """Gives two tensors of the same size the same offsets."""

    def change(header: dict) -> None:
        names = [name for name in header if header[name]["shape"] == [64]]
        header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]

    files.edit_header(directory / FIRST, change)


def gap(directory: Path) -> None:
    """Inserts eight bytes before the last tensor that belong to no tensor."""
    header, data = files.split(directory / SECOND)
    last = max(header.values(), key=lambda fields: fields["data_offsets"])
    begin, end = last["data_offsets"]
    last["data_offsets"] = [begin + 8, end + 8]
    files.join(directory / SECOND, header, data[:begin] + bytes(8) + data[begin:])


def wrong_shard(directory: Path) -> None:
    other = SECOND if holder(directory, NORM).name != SECOND else THIRD
    index(lambda weight_map: weight_map.update({NORM: other}))(directory)


def in_a_bit(stored: Stored) -> Stored:
    return Stored(stored.dtype, stored.shape, stored.data[:-1] + bytes([stored.data[-1] ^ 1]))


def in_bfloat16(stored: Stored) -> Stored:
    return Stored.of(stored.array.astype(ml_dtypes.bfloat16))


def another_expert(number: int) -> dict[str, Stored]:
    """Returns another expert like the others, with scales."""
    shapes = {"gate_proj": (48, 64), "up_proj": (48, 64), "down_proj": (64, 48)}
    new: dict[str, Stored] = {}
    for name, shape in shapes.items():
        weight = f"{EXPERTS}.{number}.{name}.weight"
        new[weight] = Stored.of(np.ones(shape, ml_dtypes.float8_e4m3fn))
        scales = (-(-shape[0] // BLOCK[0]), -(-shape[1] // BLOCK[1]))
        new[f"{weight}_scale_inv"] = Stored.of(np.ones(scales, np.float32))
    return new
