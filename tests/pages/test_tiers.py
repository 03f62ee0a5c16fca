"""Host memory, the disk and both together: what they keep, and that damage is a miss."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from dsv3_jax.pages import CacheTiers, PageRecord, PageTiers
from dsv3_jax.pages.disk import DiskPages
from dsv3_jax.pages.host_memory import HostMemory
from tests.pages.conftest import FORMAT, IDENTITY, record_of

PAGE = FORMAT.num_bytes
PROMPT = list(range(100, 126))  # six pages
OTHER = list(range(200, 226))
SECONDS = 10


def prefix(tokens: list[int]) -> list[PageRecord]:
    return [record_of(address) for address in IDENTITY.addresses(tokens)]


def fetch(source, records: list[PageRecord]) -> int:
    """Returns how many leading pages a source gives, and checks every one."""
    addresses = [record.address for record in records]
    got = source.fetch(addresses).result(SECONDS)
    for record, expected in zip(got, records, strict=False):
        record.check(IDENTITY, expected.address)
        assert record.payload.tobytes() == expected.payload.tobytes()
    return len(got)


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("??/*.page"))


class TestHostMemory:
    def test_it_gives_leading_pages(self):
        host, pages = HostMemory(100 * PAGE), prefix(PROMPT)
        host.store([*pages[:2], *pages[3:]])
        assert host.lookup([page.address for page in pages]) == 2
        assert fetch(host, pages) == 2
        assert fetch(host, pages[3:]) == 3
        assert host.stats().hit_pages == host.stats().stored_pages == 5
        assert host.stats().used_bytes == host.stats().hit_bytes == 5 * PAGE

    def test_the_end_of_a_prefix_is_evicted_first(self):
        host, pages, others = HostMemory(8 * PAGE), prefix(PROMPT), prefix(OTHER)
        for page in pages:  # as they are computed
            host.store([page])
        host.store(others[:2])
        assert fetch(host, pages) == 6
        host.store(others[2:5])  # the pages before them count as used, too
        assert (fetch(host, pages), fetch(host, others)) == (3, 5)
        assert host.stats().used_bytes == 8 * PAGE
        host.store([pages[0]])
        assert host.stats().stored_pages == 11

    def test_a_page_that_is_too_large_is_not_kept(self):
        host = HostMemory(PAGE - 1)
        host.store(prefix(PROMPT))
        assert fetch(host, prefix(PROMPT)) == host.stats().used_bytes == 0


class TestDisk:
    @pytest.fixture
    def disk(self, tmp_path):
        disk = DiskPages(tmp_path, 2**20)
        yield disk
        disk.close(SECONDS)

    def test_a_restart_keeps_it(self, disk, tmp_path):
        pages = prefix(PROMPT)
        disk.store(pages)
        disk.close(SECONDS)
        again = DiskPages(tmp_path, 2**20)
        assert again.lookup([page.address for page in pages]) == 6
        assert fetch(again, pages) == again.stats().hit_pages == 6
        size = sum(path.stat().st_size for path in files(tmp_path))
        assert again.stats().used_bytes == disk.stats().used_bytes == size > 6 * PAGE
        again.close(SECONDS)

    def test_a_damaged_file_is_a_miss_and_is_deleted(self, disk, tmp_path, caplog):
        pages = prefix(PROMPT)
        disk.store(pages)
        assert disk.flush(SECONDS)
        path = (
            tmp_path / pages[2].address.digest.hex()[:2] / f"{pages[2].address.digest.hex()}.page"
        )
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
        assert fetch(disk, pages) == 2
        assert not path.exists()
        assert "is damaged" in caplog.text
        assert disk.stats().damaged_pages == 1
        assert pages[2].address not in disk
        disk.store(pages)
        assert disk.flush(SECONDS)
        assert fetch(disk, pages) == 6

    def test_a_page_under_another_name_is_refused(self, disk, tmp_path):
        pages = prefix(PROMPT)
        disk.store(pages[:1])
        assert disk.flush(SECONDS)
        (path,) = files(tmp_path)
        name = pages[1].address.digest.hex()
        (tmp_path / name[:2]).mkdir(exist_ok=True)
        path.rename(tmp_path / name[:2] / f"{name}.page")
        assert disk.lookup([pages[1].address]) == 1
        assert fetch(disk, pages[1:]) == 0
        assert disk.stats().damaged_pages == 1

    def test_it_stays_within_its_size_and_keeps_what_is_used(self, tmp_path):
        pages, others = prefix(PROMPT), prefix(OTHER)
        size = len(pages[0].encode())
        disk = DiskPages(tmp_path, 8 * size)
        for page in [*pages, *others[:2]]:
            disk.store([page])
            assert disk.flush(SECONDS)
            time.sleep(0.002)
        assert fetch(disk, pages[:4]) == 4
        for page in others[2:]:
            disk.store([page])
            assert disk.flush(SECONDS)
            assert sum(path.stat().st_size for path in files(tmp_path)) <= 8 * size
        assert fetch(disk, others) == 6
        assert len(files(tmp_path)) <= 8
        disk.close(SECONDS)
        smaller = DiskPages(tmp_path, 3 * size)
        assert len(files(tmp_path)) <= 3
        smaller.close(SECONDS)

    def test_what_killed_writers_left_is_removed(self, tmp_path):
        (tmp_path / "ab").mkdir()
        left = tmp_path / "ab" / ".name.0123abcd.partial"
        left.write_bytes(b"x")
        foreign = tmp_path / "notes"
        foreign.mkdir()
        (foreign / ".name.0123abcd.partial").write_bytes(b"x")
        DiskPages(tmp_path, 2**20).close(SECONDS)
        assert not left.exists()
        assert (foreign / ".name.0123abcd.partial").exists()

    def test_a_full_disk_drops_pages_and_is_reported(self, disk, tmp_path, caplog):
        for number in range(256):
            (tmp_path / f"{number:02x}").write_bytes(b"")  # no folder can be made
        disk.store(prefix(PROMPT))
        assert disk.flush(SECONDS)
        assert fetch(disk, prefix(PROMPT)) == 0
        assert "not written: [Errno 17] File exists" in caplog.text
        assert disk.stats().dropped_pages == 6

    def test_a_slow_disk_drops_pages(self, tmp_path):
        disk = DiskPages(tmp_path, 2**20, unwritten=3 * PAGE)
        with disk._locked():  # nobody can write
            disk.store(prefix(PROMPT))
            assert disk.stats().dropped_pages == 3
        assert disk.flush(SECONDS)
        assert fetch(disk, prefix(PROMPT)) == 3
        disk.close(SECONDS)

    def test_a_page_that_another_process_deleted_is_stored_again(self, disk, tmp_path):
        pages = prefix(PROMPT)
        disk.store(pages)
        assert disk.flush(SECONDS)
        for page in pages[2:]:  # as its eviction does
            disk._path(page.address.digest).unlink()
        assert disk.lookup([page.address for page in pages]) == 2
        assert [page.address in disk for page in pages] == [True] * 2 + [False] * 4
        disk.store(pages)
        assert disk.flush(SECONDS)
        assert disk.lookup([page.address for page in pages]) == 6

    def test_a_disk_that_fails_is_a_miss(self, disk, monkeypatch):
        """An error would come up in the engine's thread, and end it."""
        pages = prefix(PROMPT)
        disk.store(pages)
        assert disk.flush(SECONDS)
        stat = os.stat

        def fail(path, *args, **options):
            if str(path).endswith(".page"):
                raise OSError(errno.EIO, "Input/output error")
            return stat(path, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", fail)
            assert disk.lookup([page.address for page in pages]) == 0

    def test_closing_ends_what_is_being_read(self, disk, monkeypatch):
        pages = prefix(list(range(100, 500)))
        go = threading.Event()

        def read(address):
            go.wait(SECONDS)

        monkeypatch.setattr(disk, "_read", read)
        future = disk.fetch([page.address for page in pages])
        disk.close(SECONDS)
        go.set()
        assert future.result(SECONDS) == []
        assert disk.fetch([pages[0].address]).result(0) == []


class Late:
    """A source that answers when the test says so."""

    name = "late"

    def __init__(self, pages: list[PageRecord]):
        self.pages = pages
        self.future: Future[list[PageRecord]] = Future()

    def lookup(self, addresses) -> int:
        return len(addresses)

    def fetch(self, addresses) -> Future[list[PageRecord]]:
        return self.future


class TestTogether:
    def test_each_page_comes_from_the_first_tier_that_has_it(self, tmp_path):
        pages = prefix(PROMPT)
        disk = DiskPages(tmp_path, 2**20)
        disk.store(pages[1:4])
        disk.close(SECONDS)
        late = Late(pages)
        tiers = PageTiers(CacheTiers(host_bytes=100 * PAGE, disk=tmp_path, sources=(late,)))
        assert tiers.host is not None
        tiers.host.store([pages[0], pages[2]])
        addresses = [page.address for page in pages]
        future = tiers.fetch(addresses)
        late.future.set_result(pages[4:5])  # one fewer than it seemed to have
        assert [record.address for record in future.result(SECONDS)] == addresses[:5]
        host, disk_stats = tiers.stats()
        assert (host.hit_pages, disk_stats.hit_pages) == (2, 2)
        # Now host memory has all of them.
        assert tiers.host.lookup(addresses) == 5
        assert pages[1].address in tiers  # both tiers have it
        assert pages[4].address not in tiers
        tiers.close(SECONDS)

    def test_an_error_of_a_source_is_a_miss(self):
        pages, late = prefix(PROMPT), Late([])
        tiers = PageTiers(CacheTiers(host_bytes=100 * PAGE, sources=(late,)))
        tiers.store(pages[:2])
        future = tiers.fetch([page.address for page in pages])
        late.future.set_exception(OSError("the peer is gone"))
        assert len(future.result(SECONDS)) == 2

    @pytest.mark.parametrize("method", ["lookup", "fetch"])
    def test_a_source_that_raises_is_a_miss(self, method, monkeypatch, caplog):
        pages, broken, late = prefix(PROMPT), Late([]), Late([])

        def fail(addresses):
            raise OSError("no route to host")

        monkeypatch.setattr(broken, method, fail)
        tiers = PageTiers(CacheTiers(host_bytes=100 * PAGE, sources=(broken, late)))
        tiers.store(pages[:2])
        addresses = [page.address for page in pages]
        assert tiers.lookup(addresses) == len(pages)
        future = tiers.fetch(addresses)
        late.future.set_result(pages[2:])
        # Pages that a failing source had promised are missing. If its lookup fails, it promises
        # none, and the next source is asked.
        expected = len(pages) if method == "lookup" else 2
        assert len(future.result(SECONDS)) == expected
        assert f"cache tiers: late: {method} failed: OSError('no route to host')" in caplog.text

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({}, "expected host_bytes, disk or sources"),
            ({"host_bytes": -1}, "host_bytes: expected 0 or more, got -1"),
            ({"host_bytes": 1, "load_seconds": 0}, "load_seconds: expected more than 0"),
            ({"disk": "x", "pinned": True}, "pinned: expected host_bytes with it, got 0"),
        ],
    )
    def test_settings_out_of_range(self, settings, message):
        with pytest.raises(ValueError, match=message):
            CacheTiers(**settings)
