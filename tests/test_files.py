"""Atomic writes, locks, and checks of file names that come from data."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dsv3_jax.files import (
    atomic_file,
    atomic_write,
    check_file_name,
    publish_directory,
    remove_partial_files,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("content", ["text, é, \r\n", b"\x00\xff"], ids=["text", "bytes"])
def test_a_file_is_written_and_replaced(tmp_path: Path, content: str | bytes):
    path = tmp_path / "a.json"
    for old in (None, b"x" * 1000):
        if old is not None:
            path.write_bytes(old)
        atomic_write(path, content)
        assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode())
        assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_after_a_failure_nothing_is_left_behind(tmp_path: Path, failure: type[BaseException]):
    path = tmp_path / "a"

    def write_half():
        with atomic_file(path) as file:
            file.write(b"half")
            raise failure

    with pytest.raises(failure):
        write_half()
    assert names(tmp_path) == []
    path.write_text("old")
    with pytest.raises(failure):
        write_half()
    assert names(tmp_path) == ["a"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_leaves_the_old_file_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
):
    path = tmp_path / "a"
    path.write_text("old")

    def full(*arguments: object, **named: object):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match=r"No space left on device: .*a'"):
        atomic_write(path, "new")
    assert names(tmp_path) == ["a"]
    assert path.read_text() == "old"


def test_the_file_is_synced_before_the_rename_and_the_directory_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = []
    replace, fsync = os.replace, os.fsync

    def noted_replace(source: os.PathLike[str], target: os.PathLike[str], **named: object):
        calls.append("rename")
        return replace(source, target)

    def noted_fsync(descriptor: int):
        calls.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        return fsync(descriptor)

    monkeypatch.setattr(os, "replace", noted_replace)
    monkeypatch.setattr(os, "rename", noted_replace)
    monkeypatch.setattr(os, "fsync", noted_fsync)
    atomic_write(tmp_path / "a", "new")
    assert calls == ["file", "rename", "directory"]
    calls.clear()
    (tmp_path / "new.partial" / "below").mkdir(parents=True)
    (tmp_path / "new.partial" / "below" / "b").write_text("b")
    publish_directory(tmp_path / "new.partial", tmp_path / "new")
    assert sorted(calls[:3]) == ["directory", "directory", "file"]
    assert calls[3:] == ["rename", "directory"]
    assert names(tmp_path) == ["a", "new"]


def test_permissions_are_those_of_a_new_file_or_of_the_replaced_one(tmp_path: Path):
    old = os.umask(0o027)
    try:
        atomic_write(tmp_path / "new", "")
    finally:
        os.umask(old)
    assert mode(tmp_path / "new") == 0o640
    (tmp_path / "new").chmod(0o600)
    atomic_write(tmp_path / "new", "x")
    assert mode(tmp_path / "new") == 0o600


def test_a_symbolic_link_stays_and_its_file_is_replaced(tmp_path: Path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to("there/file")
    for content in ("created", "replaced"):
        atomic_write(link, content)
        assert link.is_symlink()
        assert (tmp_path / "there" / "file").read_text() == content
    assert names(tmp_path / "there") == ["file"]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    thread = threading.Thread(target=lambda: read.append(pipe.read_text()))
    thread.start()
    atomic_write(pipe, "through")
    thread.join()
    assert read == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_missing_directory_and_a_directory_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "no" / "a"))):
        atomic_write(tmp_path / "no" / "a", "")
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        atomic_write(tmp_path, "")
    assert names(tmp_path) == []


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path):
    others = ["a", ".hidden", "a.partial", ".a.partial", ".a.0123456.partial"]
    (tmp_path / "a\nb").mkdir()
    for name in (*others, ".a.01234567.partial", ".é\n.89abcdef.partial"):
        (tmp_path / name).touch()
    remove_partial_files(tmp_path)
    assert names(tmp_path) == sorted([*others, "a\nb"])


def test_writers_of_one_file_do_not_mix(tmp_path: Path):
    path = tmp_path / "a"
    contents = [bytes([i]) * 100_000 for i in range(4)]
    threads = [threading.Thread(target=atomic_write, args=(path, c)) for c in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("name", ["a", "model-00001-of-00163.safetensors", ".hidden", "é ü", "..a"])
def test_plain_file_names_pass(name: str):
    assert check_file_name(name, "index") == name


EVIL = [
    "../a",
    "..",
    ".",
    "",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "a\0b",
    "a\nb",
    "\x1b[2J",
    "\x85",
    "\ud800",
    "a" * 256,
    "é" * 128,
    None,
    3,
    ["a"],
]


@pytest.mark.parametrize("name", EVIL, ids=ascii)
def test_what_is_no_plain_file_name_is_refused_in_one_line(name: object):
    with pytest.raises(ValueError, match=r"^index\.json: x: expected a plain file name, got ") as e:
        check_file_name(name, "index.json: x")
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 300


@pytest.mark.parametrize("name", ["a.bin", ".safetensors", "../a.safetensors"])
def test_a_required_ending_is_named(name: str):
    with pytest.raises(ValueError, match=r"plain file name ending in \.safetensors, got"):
        check_file_name(name, "index.json", ".safetensors")


def test_the_module_stands_on_the_standard_library_alone():
    code = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('f', sys.argv[1]);"
        "m = u.module_from_spec(s); s.loader.exec_module(m);"
        "assert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    )
    path = Path(__file__).parents[1] / "dsv3_jax" / "files.py"
    subprocess.run([sys.executable, "-S", "-c", code, str(path)], check=True)
