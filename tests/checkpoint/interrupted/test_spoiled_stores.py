"""A store that is spoiled between two runs of its conversion."""

import itertools
import json
import random
import re
import shutil
from pathlib import Path

import pytest

from dsv3_jax.checkpoint import journal
from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.checkpoint.store import ArrayFiles
from tests.checkpoint.interrupted.conversions import (
    JOURNAL,
    MANIFEST,
    SHARD,
    assert_right_or_refused,
    assert_whole,
    refusal,
    resumed,
    write_unnoticed,
)
from tests.support.trees import contents


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_torn_last_line(source, wholes, interrupted, cut):
    store = interrupted()
    journal = store / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-cut])
    convert(source, store, "fp8", resume=True)
    assert_whole(store, wholes["fp8"])


def test_a_line_without_its_end_does_not_count():
    """An appended line would otherwise become part of it."""
    whole = b'{"to": "fp8"}\n'
    assert journal._parse(whole + b'{"unit": "a"}') == ([{"to": "fp8"}], len(whole))


@pytest.mark.slow
@pytest.mark.parametrize("tail", [b'{"unit": "lay', b"\0" * 64, b"\xff\xfe", b"{", b"[]\n", b"\n"])
def test_garbage_after_the_last_line(source, wholes, interrupted, tail):
    """A power cut may leave such bytes of a block that was never written."""
    store = interrupted()
    with (store / JOURNAL).open("ab") as file:
        file.write(tail)
    convert(source, store, "fp8", resume=True)
    assert_whole(store, wholes["fp8"])


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["empty", "gone", "first line torn", "garbage", "middle lost"])
def test_a_spoiled_journal(source, wholes, interrupted, damage):
    store = interrupted()
    journal = store / JOURNAL
    content = journal.read_bytes()
    lines = content.splitlines(keepends=True)
    spoiled = {
        "empty": b"",
        "first line torn": content[:20],
        "garbage": b"\0" * len(content),
        "middle lost": b"".join(lines[:5] + lines[-5:]),
    }
    journal.unlink()
    if damage in spoiled:
        journal.write_bytes(spoiled[damage])
    assert_right_or_refused(source, store, "fp8", wholes["fp8"])


@pytest.mark.slow
def test_odd_lines_in_a_journal(source, wholes, interrupted):
    """JSON that no conversion writes is refused with its line number, and nothing is changed."""
    store = interrupted("int8")
    journal = store / JOURNAL
    content = journal.read_bytes()
    lines = [json.loads(line) for line in content.splitlines()]
    copy = next(i for i, line in enumerate(lines) if "model.layers.2.embed" in line.get("unit", ""))
    unit = next(i for i, line in enumerate(lines) if "error" in line)
    error = lines[unit]["error"]
    odd = [
        *((0, {key: value}) for key in lines[0] for value in (None, 5, [1])),
        (0, {"files": {SHARD: 5}}),
        *((unit, {key: value}) for key in lines[unit] for value in (None, 5, [[]], {"a": 1})),
        *((unit, {"error": error | {key: value}}) for key in error for value in (None, [], -1)),
        (unit, {"error": error | {"weight": 10**400}}),
        (unit, {"error": None, "source": {}}),
        (unit, {"source": {"model.norm.weight": "00"}}),
        (unit, {"source": lines[unit]["source"] | {"no such tensor": "00"}}),
        (unit, {"unit": "no such unit", "source": {"no such tensor": "00"}}),
        (copy, {"source": {}}),
        (copy, {"stored": {"model.norm.weight": "00"}}),
    ]
    cases = [(i, lines[i] | change) for i, change in odd]
    cases += [(unit, {"undo": []}), (unit, {"stats": 5}), (unit, {}), (unit, {"done": "x"})]
    for number, line in cases:
        changed = [*lines[:number], line, *lines[number + 1 :]]
        journal.write_bytes(b"".join(json.dumps(each).encode() + b"\n" for each in changed))
        before = contents(store)
        message = refusal(source, store, "int8", resume=True)
        assert f"{JOURNAL}, line {number + 1}: expected " in message, line
        assert contents(store) == before
    journal.write_bytes(content + b"[" * 10**5 + b"\n")  # deeper than Python's parser goes
    convert(source, store, "int8", resume=True)
    assert_whole(store, wholes["int8"])


@pytest.mark.parametrize(("first", "then"), [("fp8", "bf16"), ("int8", "int4"), ("bf16", "fp8")])
def test_a_journal_of_another_target(source, wholes, interrupted, first, then):
    store = interrupted(first)
    before = contents(store)
    line = refusal(source, store, then, resume=True)
    assert re.search(rf"\b{first}\b", line)
    assert re.search(rf"\b{then}\b", line)
    assert contents(store) == before
    convert(source, store, first, resume=True)
    assert_whole(store, wholes[first])


def test_a_journal_out_of_another_store(source, wholes, interrupted, store):
    """Its lines list all units as done, although this store has none."""
    journal = (interrupted() / JOURNAL).read_bytes()
    shutil.rmtree(store)
    store.mkdir()
    (store / JOURNAL).write_bytes(journal)
    assert_right_or_refused(source, store, "fp8", wholes["fp8"])


def spoil(path: Path, damage: str) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    changed = {
        "a bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "the first bit": bytes([content[0] ^ 1]) + content[1:],
        "zeros": bytes(len(content)),
        "truncated": content[:middle],
        "empty": b"",
        "longer": content + b"\0",
    }
    if damage == "deleted":
        path.unlink()
    else:
        write_unnoticed(path, changed[damage])


SPOILS = ["a bit", "the first bit", "zeros", "truncated", "empty", "longer", "deleted"]


def chunks(store: Path) -> list[Path]:
    """Returns the files of array data."""
    paths = (path for path in sorted((store / "weights").rglob("*")) if path.is_file())
    return [path for path in paths if path.name != "zarr.json" and not path.name.startswith("_")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "damage"),
    [*(("fp8", damage) for damage in SPOILS), ("int4", "a bit"), ("bf16", "deleted")],
)
def test_spoiled_chunks_are_written_again(source, wholes, interrupted, target, damage):
    store = interrupted(target)
    paths = chunks(store)
    assert len(paths) > 30
    for path in random.Random(damage).sample(paths, 5):
        spoil(path, damage)
    convert(source, store, target, resume=True)
    assert_whole(store, wholes[target])


OTHER_SPOILS = ["a bit", "truncated", "longer", "deleted"]


@pytest.mark.parametrize(
    "damages",
    ["alternately", *(pytest.param(damage, marks=pytest.mark.slow) for damage in OTHER_SPOILS)],
)
def test_other_spoiled_files(source, wholes, interrupted, tmp_path, damages):
    """Covers headers of arrays, orbax's own files, and copies of the source's small files."""
    cycle = itertools.cycle(OTHER_SPOILS if damages == "alternately" else [damages])
    store = interrupted("bf16")
    every = [path for path in sorted(store.rglob("*")) if path.is_file() and path.stat().st_size]
    others = [path for path in every if path not in chunks(store) and path.name != JOURNAL]
    headers = [path for path in others if path.name == "zarr.json"]
    assert headers
    backup = shutil.copytree(store, tmp_path / "backup")
    wrong = []
    for path in [path for path in others if path not in headers[1:-1]]:
        spoil(path, damage := next(cycle))
        if (line := resumed(source, store, "bf16")) is None:
            if contents(store) != contents(wholes["bf16"]):
                wrong.append(f"{path.relative_to(store)}: {damage}: not noticed")
        elif not re.fullmatch(r".{10,500}", line) or (store / MANIFEST).exists():
            wrong.append(f"{path.relative_to(store)}: {line}")
        shutil.rmtree(store)
        shutil.copytree(backup, store)
    assert not wrong, "\n".join(wrong)


def test_written_values_are_read_back(source, store, monkeypatch):
    """A disk may report success and store other bytes."""
    write = ArrayFiles.write

    def forgets(self, name, begin, block):
        write(self, name, begin, block * 0 if name == "norm.weight" else block)

    monkeypatch.setattr(ArrayFiles, "write", forgets)
    line = refusal(source, store, "fp8")
    assert re.search(
        r"model\.norm\.weight.*the data read back differs from the data written", line
    ), line


def test_files_of_a_killed_writer(source, wholes, interrupted):
    """TensorStore and the manifest write a file next to the target and rename it."""
    store = interrupted()
    leavings = [chunks(store)[0].with_name("0.__lock"), store / ".manifest.json.0a1b2c3d.partial"]
    for path in leavings:
        path.write_bytes(b"half")
    convert(source, store, "fp8", resume=True)
    assert_whole(store, wholes["fp8"])
