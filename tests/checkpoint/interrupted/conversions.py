"""Conversions that are disturbed, and what must be left of them."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv3_jax.checkpoint.convert import convert
from tests.support.checkpoints import random_tensors, write_checkpoint
from tests.support.trees import contents

MANIFEST, JOURNAL = "manifest.json", "journal.jsonl"
TARGETS = ("fp8", "bf16", "int8", "int4")
SHARD = "model-00002-of-00003.safetensors"

Convert = Callable[..., object]


def fp8_checkpoint(directory: Path, config: dict, seed: int = 0) -> Path:
    tensors = random_tensors(config, seed)
    options = {"dtype": "fp8", "shards": 3, "scales_in_other_shard": True}
    write_checkpoint(directory, config, tensors, **options)
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 128}\n')
    return directory


def refusal(source: Path, store: Path, target: str, **options) -> str:
    """Expects a conversion to fail with one line, and the store not to be marked complete."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        convert(source, store, target, **options)
    line = str(caught.value)
    assert re.fullmatch(r".{10,500}", line), line
    assert not (store / MANIFEST).exists()
    return line


def journal_lines(store: Path) -> int:
    """Returns the number of lines, or 0 without a journal. It may disappear at any moment."""
    try:
        return (store / JOURNAL).read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def converted_tensors(store: Path) -> list[str]:
    """Returns the source's tensors that the journal lists as converted."""
    lines = (store / JOURNAL).read_text().splitlines()
    return [name for line in lines for name in json.loads(line).get("source", {})]


def assert_whole(store: Path, whole: Path) -> None:
    """Expects the exact files of an undisturbed conversion."""
    got, expected = contents(store), contents(whole)
    assert sorted(got) == sorted(expected)
    assert [name for name in expected if got[name] != expected[name]] == []


def resumed(source: Path, store: Path, target: str) -> str | None:
    """Returns the line with which a resumed conversion is refused, or None if it completes."""
    try:
        convert(source, store, target, resume=True)
    except ValueError as error:
        return str(error)
    return None


def assert_right_or_refused(source: Path, store: Path, target: str, whole: Path) -> bool:
    """Resumes, and expects a one-line refusal or completion. Returns whether it was refused."""
    if (line := resumed(source, store, target)) is not None:
        assert re.fullmatch(r".{10,500}", line), line
        assert not (store / MANIFEST).exists()
        return True
    assert_whole(store, whole)
    return False


def write_unnoticed(path: Path, content: bytes) -> None:
    """Writes a file without changing its modification time and mostly not its size."""
    stat = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
