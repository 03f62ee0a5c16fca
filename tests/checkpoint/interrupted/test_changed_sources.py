"""A source that has changed when a conversion is resumed."""

import itertools
import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest

from dsv3_jax.checkpoint.conversion_plan import plan_conversion
from dsv3_jax.checkpoint.convert import convert
from tests.checkpoint import files
from tests.checkpoint.files import CONFIG, INDEX
from tests.checkpoint.interrupted.conversions import (
    SHARD,
    assert_right_or_refused,
    assert_whole,
    converted_tensors,
    fp8_checkpoint,
    refusal,
    write_unnoticed,
)
from tests.checkpoint.values import small_config
from tests.support.covering import slow_except
from tests.support.trees import contents, snapshot


def flip(path: Path, at: int) -> None:
    """Flips the lowest bit of a byte, so that the number is another finite one."""
    content = bytearray(path.read_bytes())
    while content[at] & 0x7F in (0x7E, 0x7F, 0x80, 0):
        at += 1
    content[at] ^= 1
    write_unnoticed(path, bytes(content))


def flip_tensor(source: Path, name: str) -> None:
    path = source / json.loads((source / INDEX).read_text())["weight_map"][name]
    header, _ = files.split(path)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    flip(path, 8 + length + header[name]["data_offsets"][0])


KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("fp8", "model.layers.0.input_layernorm.weight"),
        ("fp8", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("fp8", "model.norm.weight"),
        ("fp8", KV_A),
        ("fp8", f"{KV_A}_scale_inv"),
        ("bf16", KV_A),
        ("bf16", f"{KV_A}_scale_inv"),
        ("int8", EXPERT),
        ("int4", f"{EXPERT}_scale_inv"),
    ],
)
def test_a_converted_tensor_that_changed(source, wholes, interrupted, target, name):
    store = interrupted(target)
    assert name in converted_tensors(store)
    sound = {path: path.read_bytes() for path in source.glob("*.safetensors")}
    flip_tensor(source, name)
    assert name in refusal(source, store, target, resume=True)
    assert name in refusal(source, store, target, resume=True)  # a refusal repairs nothing
    for path, content in sound.items():
        write_unnoticed(path, content)
    convert(source, store, target, resume=True)
    assert_whole(store, wholes[target])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "share"),
    slow_except([*itertools.product(["fp8", "int8"], [0.05, 0.3, 0.6, 0.95])], quick=(1, 7)),
)
def test_any_tensor_that_changed(source, interrupted, tmp_path, target, share):
    """If the tensor was not converted yet, all of its new values are used."""
    store = interrupted(target, share=share)
    names = sorted(json.loads((source / INDEX).read_text())["weight_map"])
    copied = ("embed_tokens.weight", "head.weight")
    rng = random.Random(f"{target} {share}")
    name = rng.choice([name for name in names if not name.endswith(copied)])
    done = name in converted_tensors(store)
    flip_tensor(source, name)
    fresh = tmp_path / "fresh"
    convert(source, fresh, target)
    assert assert_right_or_refused(source, store, target, fresh) == done


def another_seed(source: Path) -> None:
    config = small_config()
    fp8_checkpoint(source.with_name("other"), config, seed=1)
    shutil.copy(source.with_name("other") / SHARD, source / SHARD)


def another_constant(source: Path) -> None:
    files.edit_json(source / CONFIG, lambda config: config.update(routed_scaling_factor=2.0))


def another_split(source: Path) -> None:
    """Writes the same tensors, one of them in another shard."""
    name = next(iter(files.read(source / SHARD)))
    moved = files.read(source / SHARD)[name]
    other = "model-00003-of-00003.safetensors"
    files.edit(source / SHARD, lambda tensors: tensors.pop(name))
    files.edit(source / other, lambda tensors: tensors.update({name: moved}))
    files.edit_json(source / INDEX, lambda index: index["weight_map"].update({name: other}))


def another_order(source: Path) -> None:
    header, data = files.split(source / SHARD)
    files.join(source / SHARD, dict(reversed(header.items())), data)


def without_mtp(source: Path) -> None:
    def is_mtp(name: str) -> bool:
        return name.startswith("model.layers.2.")

    for path in source.glob("*.safetensors"):
        remaining = {name: t for name, t in files.read(path).items() if not is_mtp(name)}
        files.write(path, remaining)
    index = json.loads((source / INDEX).read_text())
    remaining = {name: file for name, file in index["weight_map"].items() if not is_mtp(name)}
    (source / INDEX).write_text(json.dumps(index | {"weight_map": remaining}))


CHANGES = {
    "shard of another model": (another_seed, rf"{SHARD}|model\.\S+"),
    "a constant": (another_constant, "config.json|routed_scaling_factor"),
    "shards split otherwise": (another_split, r"model-0000\d-of-00003|model\.\S+"),
    "header in another order": (another_order, SHARD),
    "MTP layer removed": (without_mtp, r"config|model"),
}


@pytest.mark.parametrize(
    ("target", "change"), [*(("fp8", change) for change in CHANGES), ("int8", "a constant")]
)
def test_another_source(source, interrupted, target, change):
    store = interrupted(target)
    make, message = CHANGES[change]
    make(source)
    before = contents(store)
    assert re.search(message, refusal(source, store, target, resume=True))
    # The store is unchanged by the refusal, and the source may be restored.
    weights = {n: data for n, data in before.items() if n.startswith("weights")}
    after = contents(store)
    assert {n: after.get(n, b"none") for n in weights} == weights


def test_a_tokenizer_that_changed(source, interrupted, tmp_path):
    store = interrupted()
    (source / "tokenizer_config.json").write_text('{"model_max_length": 64}\n')
    fresh = tmp_path / "fresh"
    convert(source, fresh, "fp8")
    assert_right_or_refused(source, store, "fp8", fresh)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["fp8", "int4"])
def test_timestamps_and_paths_do_not_matter(source, wholes, interrupted, tmp_path, target):
    """The same bytes are in another directory, with later times, and in another order of files."""
    store = interrupted(target, share=0.6)
    moved = tmp_path / "moved"
    shutil.copytree(source, moved)
    shutil.rmtree(source)
    for number, path in enumerate(sorted(moved.iterdir(), reverse=True)):
        os.utime(path, (10**9 + number, 10**9 + number))
    convert(moved, store, target, resume=True)
    assert_whole(store, wholes[target])


@pytest.mark.slow
@pytest.mark.parametrize("change", [c for c in CHANGES if c != "shard of another model"])
def test_a_whole_store_of_another_source(source, complete, change):
    store = complete("fp8")
    before = snapshot(store)
    make, message = CHANGES[change]
    make(source)
    with pytest.raises(ValueError, match=message) as caught:
        convert(source, store, "fp8", resume=True)
    assert "\n" not in str(caught.value)
    assert snapshot(store) == before


def written_in_secret(path: Path) -> None:
    """Changes the byte of a weight, and restores the time of the last change."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("touch", "message"),
    [
        (lambda path: os.link(path, path.with_name("link")), None),
        (lambda path: path.chmod(0o600), None),
        (lambda path: os.utime(path), r"was written or replaced while it was read"),
        (lambda path: os.replace(shutil.copy(path, f"{path}.copy"), path), "written or replaced"),
        (written_in_secret, r"model\.\S+ has changed since it was converted"),
    ],
    ids=["hard link", "chmod", "touch", "replaced", "written in secret"],
)
def test_a_file_that_is_touched_during_the_conversion(source, wholes, tmp_path, touch, message):
    """A change of its links or mode is none of its content. At the end, the file is read again."""
    store, path = tmp_path / "store", source / SHARD
    remaining = [plan_conversion(source, "fp8").source_bytes]

    def progress(count: int) -> None:
        remaining[0] -= count
        if remaining[0] == 0:  # everything was read
            touch(path)

    options = {"progress": progress, "workers": 1}
    if message is None:
        convert(source, store, "fp8", **options)
        assert_whole(store, wholes["fp8"])
    else:
        assert re.search(message, refusal(source, store, "fp8", **options))
    assert remaining == [0]
