"""Conversions to a full disk, and from one that cannot be read."""

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from dsv3_jax.checkpoint.convert import convert
from tests.checkpoint.interrupted.conversions import (
    MANIFEST,
    SHARD,
    TARGETS,
    assert_whole,
    refusal,
)
from tests.support import children
from tests.support.children import Child, FailingReads
from tests.support.covering import slow_except
from tests.support.trees import contents, snapshot


@pytest.mark.parametrize(
    ("target", "limit"),
    [
        ("int4", 10_000),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("fp8", 1_000), ("fp8", 3_000), ("fp8", 15_000), ("bf16", 6_000)]
        ),
    ],
)
def test_files_that_cannot_grow(sound, wholes, tmp_path, store, target, limit):
    command = ("convert", sound, store, "--to", target)
    child = Child(tmp_path / "log", *command, hook=partial(children.small_files, limit))
    assert child.wait() == 2, child.output
    line = child.output.splitlines()[-1]
    assert re.fullmatch(rf"dsv3 convert: error: .*{re.escape(str(store))}.*", line)
    assert os.strerror(errno.EFBIG) in line
    assert "Traceback" not in child.output
    assert not (store / MANIFEST).exists()
    child = Child(tmp_path / "log", *command, "--resume")
    assert child.wait() == 0, child.output
    assert_whole(store, wholes[target])


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of a given size. A second call changes the size."""
    where = tmp_path / "disk"
    where.mkdir()

    def mount(size: int) -> Path:
        options = f"size={size}" + (",remount" if os.path.ismount(where) else "")
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)]
        if shutil.which("mount") is None:
            pytest.skip("no small disk to fill here: a tmpfs needs the mount command")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no small disk to fill here: {done.stderr.strip()}")
        return where

    yield mount
    if os.path.ismount(where):
        subprocess.run(["umount", str(where)], check=True)


def size_on_disk(directory: Path) -> int:
    """Returns the size in whole pages, as tmpfs counts it."""
    return sum(-(-len(data) // 4096) * 4096 for data in contents(directory).values() if data)


@pytest.mark.parametrize(
    ("target", "share"),
    [
        ("fp8", 0.4),
        ("int8", 0.8),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("fp8", 0.02), ("fp8", 0.97), ("bf16", 0.4)]
        ),
    ],
)
def test_a_full_disk(sound, wholes, tmp_path, small_disk, target, share):
    room = int(size_on_disk(wholes[target]) * share)
    store = small_disk(room) / "store"
    command = ("convert", sound, store, "--to", target)
    child = Child(tmp_path / "log", *command, hook=children.believes_in_space)
    assert child.wait() == 2, child.output
    line = child.output.splitlines()[-1]
    assert re.fullmatch(rf"dsv3 convert: error: .*{re.escape(str(store))}.*", line)
    assert os.strerror(errno.ENOSPC) in line
    assert not (store / MANIFEST).exists()
    small_disk(50_000_000)
    child = Child(tmp_path / "log", *command, "--resume")
    assert child.wait() == 0, child.output
    assert_whole(store, wholes[target])


def test_too_small_a_disk_is_seen_first(sound, small_disk):
    store = small_disk(100_000) / "store"
    assert re.search(r"store: .*bytes", refusal(sound, store, "fp8"))
    assert not store.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "share"),
    slow_except(
        [("fp8", 0), ("bf16", 0.1), ("int8", 0.5), ("int4", 0.9), *((t, 1) for t in TARGETS)],
        quick=(0, 3),
    ),
)
def test_a_source_that_cannot_be_read(source, wholes, interrupted, target, share):
    before = snapshot(source)
    store = interrupted(target, share=share)
    convert(source, store, target, resume=True)
    assert_whole(store, wholes[target])
    assert snapshot(source) == before


def test_a_read_error_names_the_file(source, store, reads, monkeypatch):
    monkeypatch.setattr(os, "preadv", FailingReads(reads["bf16"] // 2))
    line = refusal(source, store, "bf16")
    assert re.search(r"model-0000\d-of-00003\.safetensors|model\.\S+weight", line), line
    assert "--resume" in line


def test_a_source_that_shrinks_meanwhile(source, store, monkeypatch):
    """A tensor exists when the headers are read, but not when its values are."""
    real = os.preadv

    def preadv(*arguments):
        os.truncate(source / SHARD, 5_000)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    assert SHARD in refusal(source, store, "bf16")
