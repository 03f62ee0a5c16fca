"""Damaged and foreign sources are refused in one line, and leave nothing that looks like a store.

Errors in headers are found before anything is written. Only bad values are found later.
"""

import itertools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.checkpoint.convert import convert
from tests.checkpoint import files
from tests.checkpoint.files import CONFIG, INDEX, Stored, Tensors
from tests.checkpoint.values import small_config
from tests.support.checkpoints import random_tensors, write_checkpoint
from tests.support.command import run
from tests.support.trees import snapshot

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
TARGETS = ("fp8", "bf16", "int8", "int4")
BLOCK = (16, 40)

Harm = Callable[[Path], object]


@dataclass(frozen=True)
class Damage:
    harm: Harm
    message: str
    """Pattern that occurs in the message: the name of a tensor or of a file."""
    source: str = "fp8"
    in_values: bool = False
    """Whether the damage is only visible in the values."""


def named(*names: str) -> str:
    """Returns a pattern for any of the names, but no longer name that begins or ends with one."""
    return "|".join(rf"(?<![\w.]){re.escape(name)}(?![\w]|\.\w)" for name in names)


# ---- how to harm a source ------------------------------------------------------------------------


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


FLOAT8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(BLOCK),
}
FLOAT8_NAN = (0x7F, 0xFF)
NAN = float("nan")

DAMAGES = {
    # ---- one file
    "empty file": Damage(file_content(SECOND, lambda content: b""), named(SECOND)),
    "truncated header length": Damage(file_content(SECOND, lambda c: c[:5]), named(SECOND)),
    "truncated header": Damage(
        file_content(SECOND, lambda c: c[: header_length(c) // 2]), named(SECOND)
    ),
    "header length too long": Damage(
        file_content(SECOND, lambda c: (len(c) - 7).to_bytes(8, "little") + c[8:]), named(SECOND)
    ),
    "header length absurd": Damage(
        file_content(SECOND, lambda c: bytes([255] * 8) + c[8:]), named(SECOND)
    ),
    "header length too short": Damage(
        file_content(SECOND, lambda c: (header_length(c) - 9).to_bytes(8, "little") + c[8:]),
        named(SECOND),
    ),
    "header not JSON": Damage(file_content(SECOND, lambda c: c[:8] + b"[" + c[9:]), named(SECOND)),
    "header not an object": Damage(
        lambda directory: files.join(directory / SECOND, [], b""), named(SECOND)
    ),
    "truncated data": Damage(file_content(SECOND, lambda c: c[:-1]), named(SECOND)),
    "no data": Damage(file_content(THIRD, lambda c: c[: header_length(c)]), named(THIRD)),
    "trailing bytes": Damage(file_content(SECOND, lambda c: c + b"\n"), named(SECOND)),
    "pickled weights": Damage(file_content(SECOND, lambda c: b"PK\3\4" + c), named(SECOND)),
    "duplicate in one header": Damage(duplicate_key, named(NORM)),
    "overlapping offsets": Damage(shared_place, named(FIRST)),
    "gap in offsets": Damage(gap, named(SECOND)),
    "offsets reversed": Damage(
        entry(NORM, lambda fields: fields["data_offsets"].reverse()), named(NORM)
    ),
    "unknown dtype": Damage(relabelled(NORM, "F4"), named(NORM)),
    "shard is a directory": Damage(
        lambda directory: ((directory / SECOND).unlink(), (directory / SECOND).mkdir()),
        named(SECOND),
    ),
    # ---- the index
    "missing shard": Damage(lambda directory: (directory / SECOND).unlink(), named(SECOND)),
    "index not JSON": Damage(file_content(INDEX, lambda c: c[:-9]), named(INDEX)),
    "index and files missing": Damage(lambda directory: (directory / INDEX).unlink(), named(INDEX)),
    "index points to a missing shard": Damage(
        index(lambda weight_map: weight_map.update({NORM: "model-4.safetensors"})),
        named("model-4.safetensors"),
    ),
    "index points to the wrong shard": Damage(wrong_shard, named(NORM)),
    "index leads out of the directory": Damage(
        index(lambda weight_map: weight_map.update({NORM: f"../source/{FIRST}"})), named(NORM)
    ),
    "index leaves a tensor out": Damage(
        index(lambda weight_map: weight_map.pop(NORM)), named(NORM)
    ),
    "index leaves a scale out": Damage(
        index(lambda weight_map: weight_map.pop(KV_A_SCALE)), named(KV_A_SCALE)
    ),
    "index names what no shard has": Damage(
        index(lambda weight_map: weight_map.update({"extra.weight": SECOND})),
        named("extra.weight"),
    ),
    "duplicate in two shards": Damage(in_two_shards, named(NORM)),
    # ---- which tensors there are
    "norm missing": Damage(lost(lambda name: name == NORM), named(NORM)),
    "embedding missing": Damage(lost(lambda name: name == EMBEDDING), named(EMBEDDING)),
    "bias missing": Damage(lost(lambda name: name == BIAS), named(BIAS)),
    "weight missing": Damage(lost(lambda name: name == KV_A), named(KV_A)),
    "weight missing with its scale": Damage(lost(lambda name: KV_A in name), named(KV_A)),
    "scale missing": Damage(lost(lambda name: name == KV_A_SCALE), named(KV_A_SCALE)),
    "scales missing": Damage(
        lost(lambda name: name.endswith("_scale_inv")), r"\S+\.weight_scale_inv\b"
    ),
    "tensor of an expert missing": Damage(lost(lambda name: name == EXPERT), named(EXPERT)),
    "last expert missing": Damage(
        lost(lambda name: name.startswith(f"{LAST_EXPERT}.")), re.escape(LAST_EXPERT)
    ),
    "one expert too many": Damage(added(another_expert(4)), re.escape(f"{EXPERTS}.4.")),
    "layer missing": Damage(
        lost(lambda name: name.startswith("model.layers.1.")), r"model\.layers\.1\."
    ),
    "unknown tensor": Damage(
        added({"model.layers.0.mlp.extra.weight": Stored.of(np.ones(3, np.float32))}),
        named("model.layers.0.mlp.extra.weight"),
    ),
    "bias of a projection": Damage(
        added({f"{KV_A[:-7]}.bias": Stored.of(np.ones(40, ml_dtypes.bfloat16))}),
        named(f"{KV_A[:-7]}.bias"),
    ),
    "scale of the embedding": Damage(
        added({f"{EMBEDDING}_scale_inv": Stored.of(np.ones((10, 2), np.float32))}),
        named(f"{EMBEDDING}_scale_inv"),
    ),
    # ---- dtypes
    "float8 weight called I8": Damage(relabelled(KV_A, "I8"), named(KV_A)),
    "float8 weight called U8": Damage(relabelled(KV_A, "U8"), named(KV_A)),
    "float8 weight called F8_E8M0": Damage(relabelled(KV_A, "F8_E8M0"), named(KV_A)),
    "expert called I8": Damage(relabelled(EXPERT, "I8"), named(EXPERT)),
    "norm called F16": Damage(relabelled(NORM, "F16"), named(NORM)),
    "embedding called F16": Damage(relabelled(EMBEDDING, "F16"), named(EMBEDDING)),
    "bias called I32": Damage(relabelled(BIAS, "I32"), named(BIAS)),
    "scale called I32": Damage(relabelled(KV_A_SCALE, "I32"), named(KV_A_SCALE)),
    "norm in float8": Damage(
        tensor(NORM, lambda _: Stored.of(np.ones(64, ml_dtypes.float8_e4m3fn))), named(NORM)
    ),
    "scale in float8": Damage(
        tensor(KV_A_SCALE, lambda _: Stored.of(np.ones((3, 2), ml_dtypes.float8_e4m3fn))),
        named(KV_A_SCALE),
    ),
    "one weight in bfloat16": Damage(tensor(KV_A, in_bfloat16), named(KV_A, KV_A_SCALE)),
    "one expert in bfloat16": Damage(
        tensor(EXPERT, in_bfloat16), named(EXPERT, f"{EXPERT}_scale_inv")
    ),
    # ---- shapes
    "weight of another shape": Damage(reshaped(KV_A, 80, 32), named(KV_A)),
    "weight transposed": Damage(reshaped(KV_A, 64, 40), named(KV_A)),
    "weight flat": Damage(reshaped(KV_A, 2560), named(KV_A)),
    "expert transposed": Damage(reshaped(EXPERT, 64, 48), named(EXPERT)),
    "a row short": Damage(
        tensor(EMBEDDING, lambda stored: Stored.of(stored.array[1:])), named(EMBEDDING)
    ),
    "norm of two axes": Damage(reshaped(NORM, 1, 64), named(NORM)),
    "scale transposed": Damage(reshaped(KV_A_SCALE, 2, 3), named(KV_A_SCALE)),
    "scale flat": Damage(reshaped(KV_A_SCALE, 6), named(KV_A_SCALE)),
    "one scale for all": Damage(
        tensor(KV_A_SCALE, lambda _: Stored.of(np.ones((1, 1), np.float32))), named(KV_A_SCALE)
    ),
    # ---- values
    **{
        f"scale {number}": Damage(
            value(KV_A_SCALE, number), named(KV_A_SCALE, KV_A), in_values=True
        )
        for number in (NAN, float("inf"), -float("inf"), -1e-4)
    },
    "scale nan of an expert": Damage(
        value(f"{EXPERT}_scale_inv", NAN), named(f"{EXPERT}_scale_inv", EXPERT), in_values=True
    ),
    **{
        f"weight {byte:#x}": Damage(code(KV_A, byte), named(KV_A), in_values=True)
        for byte in FLOAT8_NAN
    },
    **{
        f"expert {byte:#x}": Damage(code(EXPERT, byte), named(EXPERT), in_values=True)
        for byte in FLOAT8_NAN
    },
    "norm nan": Damage(value(NORM, NAN), named(NORM), in_values=True),
    "norm infinite": Damage(value(NORM, float("inf")), named(NORM), in_values=True),
    "bias nan": Damage(value(BIAS, NAN), named(BIAS), in_values=True),
    "bfloat16 weight nan": Damage(value(KV_A, NAN), named(KV_A), "bfloat16", in_values=True),
    "bfloat16 expert nan": Damage(value(EXPERT, NAN), named(EXPERT), "bfloat16", in_values=True),
    # ---- the MTP layer
    "MTP layer without its experts": Damage(
        lost(lambda name: name.startswith(f"{MTP}.mlp.experts.")), rf"{MTP}\.mlp\.experts\."
    ),
    "MTP layer without its projection": Damage(
        lost(lambda name: name == f"{MTP}.eh_proj.weight"), named(f"{MTP}.eh_proj.weight")
    ),
    "MTP layer without its attention": Damage(
        lost(lambda name: name.startswith(f"{MTP}.self_attn.")), rf"{MTP}\.self_attn\."
    ),
    "MTP embedding differs": Damage(
        tensor(f"{MTP}.embed_tokens.weight", in_a_bit),
        named(f"{MTP}.embed_tokens.weight"),
        in_values=True,
    ),
    "MTP head differs": Damage(
        tensor(f"{MTP}.shared_head.head.weight", in_a_bit),
        named(f"{MTP}.shared_head.head.weight"),
        in_values=True,
    ),
    "head differs from MTP": Damage(
        tensor(HEAD, in_a_bit), named(f"{MTP}.shared_head.head.weight"), in_values=True
    ),
    # ---- config.json
    "config missing": Damage(lambda directory: (directory / CONFIG).unlink(), named(CONFIG)),
    "config not JSON": Damage(file_content(CONFIG, lambda c: c[:-3]), named(CONFIG)),
    "config not an object": Damage(file_content(CONFIG, lambda c: b"[]"), named(CONFIG)),
    "config without vocab_size": Damage(config_without("vocab_size"), "vocab_size"),
    "unknown model_type": Damage(config(model_type="llama"), "model_type"),
    "unknown key": Damage(config(sliding_window=4), "sliding_window"),
    "more experts": Damage(config(n_routed_experts=6), re.escape(f"{EXPERTS}.4.")),
    "fewer experts": Damage(
        config(n_routed_experts=2, n_group=1, num_experts_per_tok=1), r"\.mlp\.|gate"
    ),
    "more layers": Damage(config(num_hidden_layers=3), r"model\.layers\.[23]\."),
    "fewer layers": Damage(config(num_hidden_layers=1), r"model\.layers\.[12]\."),
    "more dense layers": Damage(config(first_k_dense_replace=2), r"model\.layers\.1\.mlp\."),
    "another vocab_size": Damage(config(vocab_size=161), named(EMBEDDING)),
    "another hidden_size": Damage(config(hidden_size=128), r"\S+\.weight"),
    "another kv_lora_rank": Damage(config(kv_lora_rank=16), r"kv_\S+\.weight"),
    "another dtype": Damage(config(torch_dtype="float16"), r"\S+\.weight"),
    "quantization_config missing": Damage(
        config_without("quantization_config"), r"\S+\.weight(_scale_inv)?\b"
    ),
    "another weight_block_size": Damage(
        quantization(weight_block_size=[128, 128]), r"\S+\.weight_scale_inv"
    ),
    "weight_block_size transposed": Damage(
        quantization(weight_block_size=[40, 16]), r"\S+\.weight_scale_inv"
    ),
    "unknown quant_method": Damage(quantization(quant_method="awq"), "quant_method"),
    "unknown fmt": Damage(quantization(fmt="e5m2"), "quantization_config.fmt"),
    "unknown scale_fmt": Damage(quantization(scale_fmt="ue4m3"), "scale_fmt"),
    "quantization_config of bfloat16 weights": Damage(
        config(quantization_config=FLOAT8), r"\S+\.weight(_scale_inv)?\b", "bfloat16"
    ),
    "scale beside a bfloat16 weight": Damage(
        added({KV_A_SCALE: Stored.of(np.ones((3, 2), np.float32))}), named(KV_A_SCALE), "bfloat16"
    ),
}


# ---- what becomes of it --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> dict[str, Path]:
    """Returns undamaged sources by dtype."""
    tensors = random_tensors(small_config())
    written = {"fp8": {"block": BLOCK, "scales_in_other_shard": True}, "bfloat16": {}}
    folder = tmp_path_factory.mktemp("sound")
    for dtype, options in written.items():
        write_checkpoint(folder / dtype, small_config(), tensors, dtype=dtype, shards=3, **options)
    return {dtype: folder / dtype for dtype in written}


@pytest.fixture
def source(tmp_path, sound) -> Callable[[str], Path]:
    def copy(dtype: str) -> Path:
        return shutil.copytree(sound[dtype], tmp_path / "source")

    return copy


OTHER_TARGETS = itertools.cycle(target for target in TARGETS if target != "fp8")
CASES = [
    pytest.param(damage, target, id=f"{name} to {target}")
    for name, damage in DAMAGES.items()
    for target in ("fp8", next(OTHER_TARGETS))
]


def test_there_are_many_kinds():
    assert len(DAMAGES) > 90
    assert {target for *_, target in (case.values for case in CASES)} == set(TARGETS)


@pytest.mark.parametrize("dtype", ["fp8", "bfloat16"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_sound_source_is_converted(source, tmp_path, dtype, target):
    """The refusals are meaningful only if an undamaged source is converted."""
    directory, destination = source(dtype), tmp_path / "store"
    before = snapshot(directory)
    convert(directory, destination, target)
    assert snapshot(directory) == before
    assert (destination / "manifest.json").is_file()


@pytest.mark.parametrize(("damage", "target"), CASES)
def test_a_damaged_source_is_refused(source, tmp_path, damage, target):
    directory, destination = source(damage.source), tmp_path / "store"
    sound = snapshot(directory)
    damage.harm(directory)
    before = snapshot(directory)
    assert before != sound
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        convert(directory, destination, target)
    line = str(caught.value)
    # A dot of the pattern does not match a line break, and the line is printable.
    assert re.fullmatch(r".{10,500}", line), line
    assert re.search(damage.message, line), line
    assert snapshot(directory) == before
    assert not (destination / "manifest.json").exists()
    if not damage.in_values:
        assert not destination.exists()
        assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("target", ["bf16", "int8", "int4"])
def test_a_scale_that_is_too_large(source, tmp_path, target):
    """Every stored number is finite, but a product of value and scale is not."""
    directory, destination = source("fp8"), tmp_path / "store"
    value(KV_A_SCALE, 3e38)(directory)
    with pytest.raises(ValueError, match=rf"^({named(KV_A, KV_A_SCALE)}): .*$"):
        convert(directory, destination, target)
    assert not (destination / "manifest.json").exists()


@pytest.mark.parametrize("target", ["bf16", "int8", "fp8"])
def test_a_float_that_is_too_large(tmp_path, target):
    """The largest float32 value is infinite in bfloat16."""
    directory, destination, small = tmp_path / "source", tmp_path / "store", small_config()
    write_checkpoint(directory, small, random_tensors(small), dtype="float32", shards=3)
    value(NORM, 3.4e38)(directory)
    with pytest.raises(ValueError, match=rf"^{named(NORM)}: .*$"):
        convert(directory, destination, target)
    assert not (destination / "manifest.json").exists()


@pytest.mark.parametrize("target", TARGETS)
def test_a_refused_source_leaves_no_store(source, tmp_path, target):
    directory, destination = source("fp8"), tmp_path / "store"
    value("model.norm.weight", NAN)(directory)
    with pytest.raises(ValueError, match=r"^\S*.*model\.norm\.weight.*$"):
        convert(directory, destination, target)
    if destination.exists():
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            dsv3_jax.load(destination)
        assert re.fullmatch(r".{10,500}", str(caught.value))


@pytest.mark.parametrize(
    "kind", ["truncated data", "scale missing", "expert 0x7f", "config missing"]
)
def test_the_command_reports_damage_in_one_line(source, tmp_path, capsys, kind):
    directory, damage = source("fp8"), DAMAGES[kind]
    damage.harm(directory)
    assert run("convert", directory, tmp_path / "store", "--to", "bf16") == 2
    out, err = capsys.readouterr()
    assert not out
    line = err.splitlines()[-1]
    assert re.fullmatch(r"dsv3 convert: error: .{10,500}", line)
    assert re.search(damage.message, line)
    assert "Traceback" not in err


@pytest.mark.parametrize("where", ["nowhere", "source/model-00001-of-00003.safetensors"])
def test_a_source_that_is_no_directory(source, tmp_path, where):
    source("fp8")
    with pytest.raises(ValueError, match=where.split("/")[-1]) as caught:
        convert(tmp_path / where, tmp_path / "store", "fp8")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("target", ["fp16", "", "FP8", "int2"])
def test_an_unknown_target(source, tmp_path, target):
    with pytest.raises(ValueError, match=r"^to: .*fp8.*$") as caught:
        convert(source("fp8"), tmp_path / "store", target)
    assert repr(target) in str(caught.value)
    assert not (tmp_path / "store").exists()
