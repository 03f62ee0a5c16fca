"""A tier on disk returns no wrong page."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

import pytest

from dsv3_jax.pages import PageRecord
from dsv3_jax.pages.disk import DiskPages
from tests.pages import page_damage
from tests.pages.conftest import IDENTITY, record_of

SECONDS = 10
RECORDS = [record_of(address) for address in IDENTITY.addresses(list(range(100, 126)))]
ADDRESSES = [record.address for record in RECORDS]
DAMAGED = RECORDS[2]


def changed(length: int | None = None, text: bytes | None = None, **values) -> bytes:
    """Returns the damaged record with another header and a right checksum.

    Args:
      length: bytes of the header, in the place of the right number.
      text: the whole header.
      values: of the header, as Python writes JSON.
    """
    data = DAMAGED.encode()
    (old,) = struct.unpack("<Q", data[16:24])
    if text is None:
        text = json.dumps(json.loads(data[24 : 24 + old]) | values).encode()
    length = len(text) if length is None else length
    content = data[:16] + struct.pack("<Q", length) + text + data[24 + old : -32]
    return content + hashlib.sha256(content).digest()


def arrays(*of: object) -> dict[str, object]:
    return {"page_size": 4, "arrays": [list(of)]}


NESTED = b"[" * 200_000 + b"]" * 200_000
KINDS = {
    "nothing": b"",
    "the end is missing": DAMAGED.encode()[:-1],
    "only the magic": DAMAGED.encode()[:16],
    "something after it": DAMAGED.encode() + bytes(64),
    "no record": os.urandom(500),
    "a header that is longer than the file": changed(length=10**6),
    "a header of 2**63 bytes": changed(length=2**63),
    "a header of no bytes": changed(length=0),
    "a header that is no text": changed(text=b"\xff\xfe" * 40),
    "a header that is a list": changed(text=b"[]"),
    "a header that is nested": changed(text=NESTED),
    "a value that is nested": changed(text=b'{"format": ' + NESTED + b"}"),
    "a number of 5,000 digits": changed(text=b'{"format": ' + b"9" * 5000 + b"}"),
    "tokens that are infinite": changed(tokens=[float("inf")] * 5),
    "tokens that are no numbers": changed(tokens=[float("nan")] * 5),
    "tokens of more than 32 bits": changed(tokens=[2**40] * 5),
    "tokens that are an object": changed(tokens={"1": 2}),
    "a digest of other digits": changed(digest="xy" * 32),
    "a digest that is a number": changed(digest=1),
    "arrays that are infinite": changed(format=arrays("a", float("inf"), "float32")),
    "arrays of 4,000 digits": changed(format=arrays("a", int("9" * 4000), "float32")),
    "arrays of less than nothing": changed(format=arrays("a", -7, "float32")),
    "arrays of no dtype": changed(format=arrays("a", 1, "float33")),
    "arrays of a dtype that is a list": changed(format=arrays("a", 1, [["x", "O"]])),
    "arrays of a dtype that is code": changed(format=arrays("a", 1, "(2,)f8,(" * 50)),
    "arrays with too many numbers": changed(format=arrays("a", 1, "float32", 4, 5, 6)),
    "arrays that are null": changed(format=None),
}


@pytest.fixture
def disk(tmp_path):
    disk = DiskPages(tmp_path, 2**20)
    disk.store(RECORDS)
    assert disk.flush(SECONDS)
    yield disk
    disk.close(SECONDS)


def path_of(disk: DiskPages, record: PageRecord = DAMAGED) -> Path:
    return disk._path(record.address.digest)


def check_removed(disk: DiskPages, caplog) -> None:
    """The damaged page ends what is fetched, is reported and deleted, and can be stored again."""
    assert len(disk.fetch(ADDRESSES).result(SECONDS)) == 2
    assert not path_of(disk).exists()
    assert disk.stats().damaged_pages == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{path_of(disk)} was deleted: " in line
    assert len(line) < 600
    assert "\n" not in line
    assert DAMAGED.address not in disk
    disk.store(RECORDS)
    assert disk.flush(SECONDS)
    assert len(disk.fetch(ADDRESSES).result(SECONDS)) == len(RECORDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_a_miss_and_removed(kind, disk, caplog):
    path_of(disk).write_bytes(KINDS[kind])
    check_removed(disk, caplog)


@pytest.mark.parametrize("size", [2**40, 2**20 + 2**19])
def test_a_file_that_grew_is_not_read(size, disk, caplog, monkeypatch):
    """The capacity does not bound what another program makes of a file."""
    os.truncate(path_of(disk), size)
    check_removed(disk, caplog)


def test_what_is_no_file_is_not_opened(disk, caplog):
    path_of(disk).unlink()
    os.mkfifo(path_of(disk))  # whose reader would wait for a writer
    check_removed(disk, caplog)


@pytest.mark.parametrize(
    "error", [MemoryError, OverflowError, RecursionError, AssertionError("x"), SystemExit, KeyError]
)
@pytest.mark.parametrize("method", ["read", "decode"])
def test_any_error_of_a_record_ends_the_future(error, method, disk, monkeypatch):
    works = getattr(PageRecord, method)
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise error
        return works(*arguments)

    monkeypatch.setattr(PageRecord, method, fail)
    records = disk.fetch(ADDRESSES).result(SECONDS)
    assert [record.address for record in records] == ADDRESSES[: len(records)]
    assert len(records) < len(ADDRESSES), "the page that failed was found"
    monkeypatch.undo()
    disk.store(RECORDS)
    assert disk.flush(SECONDS)
    assert len(disk.fetch(ADDRESSES).result(SECONDS)) == len(ADDRESSES)


@pytest.mark.parametrize("error", [MemoryError, RuntimeError("x"), RecursionError, ValueError])
def test_any_error_of_the_writer_drops_pages_and_is_reported(error, tmp_path, monkeypatch, caplog):
    disk = DiskPages(tmp_path, 2**20)

    def fail(record):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(PageRecord, "parts", fail)
        disk.store(RECORDS)
        assert disk.flush(SECONDS), "the thread that writes has ended"
    assert disk.stats().dropped_pages == len(RECORDS)
    assert "pages were not written: " in caplog.text
    disk.store(RECORDS)
    assert disk.flush(SECONDS)
    assert len(disk.fetch(ADDRESSES).result(SECONDS)) == len(RECORDS)
    disk.close(SECONDS)


def test_flipped_bits(tmp_path):
    done = page_damage.flip_bits(tmp_path, flips=8)
    assert done["refused"] == 8
    assert done["right"] > 8


@pytest.mark.slow
def test_killed_writers(tmp_path):
    assert page_damage.kill_writers(tmp_path, rounds=3)["right"] > 20


@pytest.mark.slow
def test_two_processes(tmp_path):
    done = page_damage.two_processes(tmp_path, seconds=1.5)
    assert done["right"] > 20
    assert done["refused"] == 0


def test_a_wrong_page_is_noticed(tmp_path, monkeypatch):
    with page_damage.opened(tmp_path, 2**30) as disk:
        wanted = page_damage.addresses(0)
        disk.store([page_damage.record_of(address) for address in wanted])
        assert disk.flush(60)
        other = page_damage.record_of(wanted[1])
        monkeypatch.setattr(page_damage, "record_of", lambda address: other)
        with pytest.raises(page_damage.WrongPageError):
            page_damage.read(disk, wanted)
