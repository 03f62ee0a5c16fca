"""`dsv3 convert --dry-run` on the headers of a complete DeepSeek-V3, in files without values."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dsv3_jax import presets
from tests.checkpoint import files
from tests.checkpoint.files import CONFIG, INDEX
from tests.checkpoint.values import small_config
from tests.support.checkpoints import random_tensors, write_checkpoint
from tests.support.command import run
from tests.support.sparse import write_sparse_checkpoint
from tests.support.trees import contents, snapshot

ROOT = Path(__file__).parents[2]
TARGETS = ("fp8", "bf16", "int8", "int4")
SHARDS = 163
GIB = 2**30
SCALE = "_scale_inv"
LAST = "model.layers.4.mlp.experts.255.down_proj.weight"  # of the short V3

# A process counts the memory of the one that it was forked from, here pytest's: one lies between.
MEASURE = """
import json, os, subprocess, sys, time
began = time.monotonic()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
out, err = process.communicate()
import resource
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
unit = 1 if sys.platform == "darwin" else 1024
print(json.dumps([process.returncode, out, err, time.monotonic() - began, usage.ru_maxrss * unit]))
"""
# Simulates a disk that is large enough.
ROOMY = """
import shutil, sys
usage = shutil.disk_usage("/")
shutil.disk_usage = lambda path: usage._replace(total=2**50, free=2**50)
"""
COMMAND = "import sys; from dsv3_jax.cli.main import main; sys.exit(main(sys.argv[1:]))"


class Measured(NamedTuple):
    status: int
    out: str
    err: str
    seconds: float
    peak_bytes: int


def dry_run(*arguments: object) -> Measured:
    """Runs the command in a process of its own."""
    words = ["convert", *map(str, arguments), "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, sys.executable, "-c", ROOMY + COMMAND, *words],
        capture_output=True,
        check=True,
        cwd=ROOT,
    )
    return Measured(*json.loads(done.stdout))


@pytest.fixture(scope="module")
def v3(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("v3") / "source"
    write_sparse_checkpoint(directory, presets.DEEPSEEK_V3.to_hf(), SHARDS)
    return directory


@pytest.fixture(scope="module")
def short_v3(tmp_path_factory) -> Path:
    """A model with the widths of V3 and five layers."""
    config = dataclasses.replace(presets.DEEPSEEK_V3, num_hidden_layers=5)
    directory = tmp_path_factory.mktemp("short") / "source"
    write_sparse_checkpoint(directory, config.to_hf(), 11)
    return directory


def sizes(directory: Path) -> dict[str, tuple[int, int]]:
    """Returns length and modification time of every file, instead of comparing 688 GB."""
    stats = {path.name: path.stat() for path in (directory, *directory.iterdir())}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def test_the_checkpoint_is_large_and_takes_no_room(v3):
    shards = sorted(v3.glob("*.safetensors"))
    assert len(shards) == SHARDS
    assert sum(path.stat().st_size for path in shards) > 688_574_839_360
    assert sum(path.stat().st_blocks * 512 for path in v3.iterdir()) < 50_000_000
    weight_map = json.loads((v3 / INDEX).read_text())["weight_map"]
    assert len(weight_map) == 91_991
    scales = [name for name in weight_map if name.endswith(SCALE)]
    assert len(scales) == 45_808
    assert not [name for name in scales if weight_map[name] == weight_map[name[: -len(SCALE)]]]


# ---- DeepSeek-V3 ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "least", "most"),
    [
        # Float8 keeps everything except the copies of embedding and head. The others have 671
        # billion weights (and 13 of MTP) of 2, 1 and 1/2 bytes, with scales.
        ("fp8", 684.86e9, 684.95e9),
        pytest.param("bf16", 1.365e12, 1.37e12, marks=pytest.mark.slow),
        pytest.param("int8", 684e9, 687e9, marks=pytest.mark.slow),
        pytest.param("int4", 360e9, 372e9, marks=pytest.mark.slow),
    ],
)
def test_a_whole_v3(v3, tmp_path, target, least, most):
    before = sizes(v3)
    options = ("--to", target, "--workers", 1, "--json")  # a worker needs 0.2 GB
    measured = dry_run(v3, tmp_path / "store", *options)
    assert measured.status == 0, measured.err
    planned = json.loads(measured.out)
    assert planned["tensors"] == 91_991
    assert planned["source_bytes"] == 688_574_839_360
    assert least < planned["store_bytes"] < most
    assert 1_000 < planned["files"] < 100_000
    assert planned["free_bytes"] == 2**50
    assert planned["peak_bytes"] < GIB
    assert measured.peak_bytes < GIB
    assert measured.seconds < 60
    assert sizes(v3) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_whole_v3_on_too_small_a_disk(v3, tmp_path, capsys, monkeypatch):
    """The report is printed although the disk is too small."""
    usage = shutil.disk_usage("/")._replace(free=10**11)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert run("convert", v3, tmp_path / "store", "--to", "fp8", "--dry-run") == 2
    err = capsys.readouterr().err
    assert "91,991 tensors, 688,574,839,360 bytes" in err
    assert re.fullmatch(
        r"dsv3 convert: error: .*bytes of free disk, got 100,.*", err.splitlines()[-1]
    )


def change_header(path: Path, change: Callable[[dict], object]) -> None:
    """Rewrites the header of a file that is too long to be read."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    change(header)
    size = path.stat().st_size
    text = json.dumps(header).encode().ljust(length)
    assert len(text) == length
    with path.open("r+b") as file:
        file.seek(8)
        file.write(text)
    assert path.stat().st_size == size


def transpose(header: dict) -> None:
    header[LAST]["shape"].reverse()


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def fp8_as_int8(header: dict) -> None:
    header[LAST]["dtype"] = "I8"


@pytest.fixture
def last_shard(short_v3) -> Iterator[Path]:
    """Yields the shard of the last expert, and restores it afterwards."""
    path = short_v3 / json.loads((short_v3 / INDEX).read_text())["weight_map"][LAST]
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
    yield path
    with path.open("r+b") as file:
        file.seek(8)
        file.write(header)
        file.truncate(size)


@pytest.mark.parametrize("damage", [transpose, fp8_as_int8, truncate])
def test_a_damaged_v3(short_v3, tmp_path, capsys, last_shard, damage):
    if damage is truncate:
        truncate(last_shard)
    else:
        change_header(last_shard, damage)
    arguments = (short_v3, tmp_path / "store", "--to", "bf16", "--dry-run", "--json")
    assert run("convert", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    name = last_shard.name if damage is truncate else LAST
    assert re.fullmatch(rf"dsv3 convert: error: .*{re.escape(name)}.*\n", err)
    assert list(tmp_path.iterdir()) == []


# ---- small ones ----------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path) -> Path:
    directory, config = tmp_path / "source", small_config()
    options = {"dtype": "fp8", "shards": 3, "scales_in_other_shard": True}
    write_checkpoint(directory, config, random_tensors(config), **options)
    return directory


@pytest.mark.parametrize("target", TARGETS)
def test_the_plan_equals_the_written_store(source, tmp_path, capsys, target):
    before = snapshot(source)
    store = tmp_path / "store"
    assert run("convert", source, store, "--to", target, "--dry-run", "--json") == 0
    out, _ = capsys.readouterr()
    assert out.count("\n") == 1
    planned = json.loads(out)
    assert not store.exists()
    tensors = files.read_directory(source)
    assert planned["tensors"] == len(tensors)
    assert planned["source_bytes"] == sum(len(tensor.data) for tensor in tensors.values())
    assert run("convert", source, store, "--to", target, "--json") == 0
    chunks = [
        len(data)
        for name, data in contents(store / "weights").items()
        if data is not None and "/c/" in f"/{name}"
    ]
    assert planned["files"] == len(chunks)
    # Each file ends with an index of 16 bytes per inner chunk and a checksum of 4 bytes.
    assert 0 <= sum(chunks) - planned["store_bytes"] < 0.02 * planned["store_bytes"] + 1000 * 20
    assert snapshot(source) == before


def test_too_small_a_disk(source, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert run("convert", source, tmp_path / "store", "--to", "bf16", "--dry-run") == 2
    err = capsys.readouterr().err
    tensors = files.read_directory(source).values()
    assert f"{len(tensors)} tensors, {sum(len(tensor.data) for tensor in tensors):,} bytes" in err
    line = err.splitlines()[-1]
    assert re.fullmatch(r"dsv3 convert: error: .*bytes of free disk, got 100,000", line)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_nothing_of_an_unfinished_store_is_touched(source, tmp_path, resume):
    store = tmp_path / "store"
    flags = ("--to", "fp8", "--dry-run", *(("--resume",) if resume else ()))
    shutil.copytree(source, tmp_path / "other")
    files.edit(tmp_path / "other" / "model-00002-of-00003.safetensors", spoil_a_norm)
    assert run("convert", tmp_path / "other", store, "--to", "fp8") == 2
    assert (store / "journal.jsonl").is_file()
    before = snapshot(store)
    run("convert", source, store, *flags)
    assert snapshot(store) == before


def spoil_a_norm(tensors: files.Tensors) -> None:
    name = next(name for name in tensors if name.endswith("layernorm.weight"))
    array = tensors[name].array.copy()
    array[0] = float("nan")
    tensors[name] = files.Stored.of(array)


@pytest.mark.parametrize("file", [CONFIG, INDEX, "model-00002-of-00003.safetensors"])
def test_a_damaged_source(source, tmp_path, capsys, file):
    (source / file).write_bytes((source / file).read_bytes()[:-7])
    assert run("convert", source, tmp_path / "store", "--to", "fp8", "--dry-run") == 2
    assert re.fullmatch(rf"dsv3 convert: error: .*{re.escape(file)}.*\n", capsys.readouterr().err)
    assert not (tmp_path / "store").exists()
