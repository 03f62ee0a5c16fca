"""A conversion writes only where it may, and leaves a complete store as it is."""

import os
import re
import shutil
from pathlib import Path

import pytest

import dsv3_jax
from dsv3_jax.checkpoint.convert import convert
from tests.checkpoint.interrupted.conversions import TARGETS, assert_whole, refusal
from tests.support.command import run
from tests.support.trees import snapshot


@pytest.mark.parametrize("where", ["source", "source/store", "source/deep/er", "link/store", "."])
def test_source_and_destination_are_separate(source, tmp_path, where):
    (tmp_path / "link").symlink_to(source)
    before = snapshot(source)
    for resume in (False, True):
        line = refusal(source, tmp_path / where, "fp8", resume=resume)
        assert Path(where).name in line or "source" in line
    assert snapshot(source) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "source"]


@pytest.mark.parametrize("what", ["file", "stranger", "checkpoint"])
def test_a_destination_that_is_something_else(source, sound, store, what):
    """Foreign files are never overwritten, with or without --resume."""
    if what == "file":
        store.write_text("mine")
    elif what == "stranger":
        store.mkdir()
        (store / "thesis.txt").write_text("mine")
    else:
        shutil.copytree(sound, store)
    before = store.read_text() if what == "file" else snapshot(store)
    for resume in (False, True):
        assert "store" in refusal(source, store, "fp8", resume=resume)
    assert (store.read_text() if what == "file" else snapshot(store)) == before


def test_an_unfinished_store_needs_resume(source, interrupted):
    store = interrupted()
    before = snapshot(store)
    assert "--resume" in refusal(source, store, "fp8")
    assert snapshot(store) == before


def test_an_unfinished_store_is_not_loaded(interrupted):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        dsv3_jax.load(interrupted())
    assert re.fullmatch(r".*store.*", str(caught.value))


def test_a_source_that_may_not_be_written(source, wholes, store):
    for path in (*source.iterdir(), source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        convert(source, store, "fp8")
    finally:
        source.chmod(0o755)
    assert_whole(store, wholes["fp8"])


# ---- a store that is whole -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_whole_store_resumed(sound, complete, capsys, target):
    store = complete(target)
    before = snapshot(store)
    assert run("convert", sound, store, "--to", target, "--resume") == 0
    assert "complete" in capsys.readouterr().err
    assert snapshot(store) == before


def test_a_whole_store_of_a_younger_source(source, complete):
    store = complete("fp8")
    before = snapshot(store)
    for path in source.iterdir():
        os.utime(path)
    convert(source, store, "fp8", resume=True)
    assert snapshot(store) == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_whole_store_is_not_written_over(sound, complete, capsys, resume):
    store = complete("fp8")
    before = snapshot(store)
    to = ("--to", "bf16" if resume else "fp8", *(("--resume",) if resume else ()))
    assert run("convert", sound, store, *to) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"dsv3 convert: error: .*store.*", line)
    assert snapshot(store) == before
