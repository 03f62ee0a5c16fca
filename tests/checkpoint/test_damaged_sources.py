"""Damaged and foreign sources are refused in one line, and leave nothing that looks like a store.

Errors in headers are found before anything is written. Only bad values are found later.
"""

import itertools
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import dsv3_jax
from dsv3_jax.checkpoint.convert import convert
from tests.checkpoint.damages import DAMAGES, NAN, named
from tests.checkpoint.harms import BLOCK, KV_A, KV_A_SCALE, NORM, value
from tests.checkpoint.values import small_config
from tests.support.checkpoints import random_tensors, write_checkpoint
from tests.support.command import run
from tests.support.trees import snapshot

TARGETS = ("fp8", "bf16", "int8", "int4")


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
