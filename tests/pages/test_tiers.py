"""Host memory, the disk and both together: what they keep, and that damage is a miss."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dsv3_jax.pages import CacheTiers, PageRecord, PageTiers
from dsv3_jax.pages.disk import DiskPages
from dsv3_jax.pages.tiers import HostMemory
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

    @pytest.mark.parametrize("batch", [1, 3, 20])
    def test_of_a_prefix_that_is_too_large_the_beginning_is_kept(self, batch):
        host, pages = HostMemory(8 * PAGE), prefix(list(range(100, 181)))  # 20 pages
        for begin in range(0, len(pages), batch):
            host.store(pages[begin : begin + batch])
        assert fetch(host, pages) == 8
        assert host.stats().used_bytes == 8 * PAGE
        others = prefix(OTHER)
        host.store(others[3:])  # without those before them, they are of no use
        assert (fetch(host, pages), fetch(host, others)) == (8, 0)
        host.store(others[:2])
        assert (fetch(host, pages), fetch(host, others)) == (6, 2)

    def test_pages_of_several_requests_that_are_stored_together(self):
        host, pages, others = HostMemory(12 * PAGE), prefix(PROMPT), prefix(OTHER)
        for both in zip(pages, others, strict=True):  # as a step fills them
            host.store(both)
        host.store(prefix(list(range(300, 326)))[:4])
        assert fetch(host, pages) + fetch(host, others) == 8

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

    def test_of_a_prefix_that_is_too_large_the_beginning_is_kept(self, tmp_path):
        pages, others = prefix(list(range(100, 181))), prefix(OTHER)
        size = len(pages[0].encode())
        disk = DiskPages(tmp_path, 10 * size)
        for page in pages:
            disk.store([page])
            assert disk.flush(SECONDS)
        assert fetch(disk, pages) == len(files(tmp_path)) == 10
        assert disk.stats().used_bytes == sum(path.stat().st_size for path in files(tmp_path))
        disk.store(others[3:])  # without those before them, they are of no use
        assert disk.flush(SECONDS)
        assert fetch(disk, pages) == len(files(tmp_path)) == 10
        disk.close(SECONDS)

    def test_a_restart_keeps_the_order_of_use(self, tmp_path):
        """It knows no page before it reads it, and new pages follow old ones."""
        pages, others = prefix(PROMPT), prefix(OTHER)
        size = len(pages[0].encode())
        disk = DiskPages(tmp_path, 8 * size)
        disk.store(pages[:4])
        disk.close(SECONDS)
        disk = DiskPages(tmp_path, 8 * size)
        disk.store(pages[4:])
        disk.close(SECONDS)
        disk = DiskPages(tmp_path, 8 * size)
        disk.store(others[:4])
        disk.close(SECONDS)
        disk = DiskPages(tmp_path, 8 * size)
        counts = fetch(disk, pages), fetch(disk, others)
        assert counts[1] == 4
        assert sum(counts) == len(files(tmp_path)) > 4
        disk.close(SECONDS)

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


def _prompts() -> list[list[PageRecord]]:
    """The pages of prompts that begin alike, and of one that is longer than the tiers."""
    system = list(range(8))
    prompts = [[*system, *range(100 * n, 100 * n + 17)] for n in range(1, 4)]
    return [prefix(prompt) for prompt in (*prompts, [*system, 9], list(range(500, 600)))]


class OrderOfUse(RuleBasedStateMachine):
    """Whatever is stored, loaded and evicted, no tier keeps a page without all of those before it.

    Several requests run at a time, each with some of its pages stored. As in an engine, their new
    pages are stored together, except for those that every tier has.
    """

    PROMPTS = _prompts()
    PAGES = 10

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.host = HostMemory(self.PAGES * PAGE)
        self.size = len(self.PROMPTS[0][0].encode())
        self.disk = self.opened(self.PAGES)
        self.done = [0] * len(self.PROMPTS)

    def opened(self, pages: int) -> DiskPages:
        # Records differ by some digits of their tokens.
        return DiskPages(self.directory.name, pages * (self.size + 40))

    def teardown(self) -> None:
        self.disk.close(SECONDS)
        self.directory.cleanup()

    @rule(counts=st.lists(st.integers(0, 4), min_size=5, max_size=5))
    def compute(self, counts):
        records: list[PageRecord] = []
        for number, (prompt, count) in enumerate(zip(self.PROMPTS, counts, strict=True)):
            begin = self.done[number] if self.done[number] < len(prompt) else 0
            records += prompt[begin : begin + count]
            self.done[number] = begin + count
        records = list({record.address.digest: record for record in records}.values())
        records = [r for r in records if not (r.address in self.host and r.address in self.disk)]
        self.host.store(records)
        self.disk.store(records)
        assert self.disk.flush(SECONDS)

    @rule(number=st.integers(0, 4), first=st.integers(0, 3))
    def load(self, number, first):
        """Loads what follows the pages of the device, which were stored when it had them."""
        first = min(first, self.done[number])
        pages = self.PROMPTS[number][first:]
        begin = fetch(self.host, pages)
        records = self.disk.fetch([page.address for page in pages[begin:]]).result(SECONDS)
        self.host.store(records)
        self.done[number] = first + begin + len(records)

    @rule(pages=st.sampled_from([5, 10]))
    def restart(self, pages):
        self.disk.close(SECONDS)
        self.disk = self.opened(pages)
        self.clear()

    @rule()
    def clear(self):
        self.host.clear()
        self.done = [0] * len(self.PROMPTS)

    @invariant()
    def every_page_can_be_found(self):
        names = {path.stem for path in files(Path(self.directory.name))}
        for prompt in self.PROMPTS:
            for is_in_tier in (
                [record.address in self.host for record in prompt],
                [record.address.digest.hex() in names for record in prompt],
            ):
                assert is_in_tier == sorted(is_in_tier, reverse=True), (
                    "a page lacks those before it"
                )
        assert self.host.stats().used_bytes <= self.PAGES * PAGE
        assert len(names) <= self.PAGES


TestOrderOfUse = OrderOfUse.TestCase
TestOrderOfUse.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


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

    def test_2000_parts_take_turns(self):
        """They are joined without recursion, and every page is looked up a few times at most."""
        pages = prefix(list(range(8005)))
        lookups = 0

        class Other(HostMemory):
            def lookup(self, addresses) -> int:
                nonlocal lookups
                count = super().lookup(addresses)
                lookups += count + 1
                return count

        other = Other(10**4 * PAGE)
        for page in pages[1::2]:
            other.store([page])
        tiers = PageTiers(CacheTiers(host_bytes=10**4 * PAGE, sources=(other,)))
        assert tiers.host is not None
        for page in pages[::2]:
            tiers.host.store([page])
        addresses = [page.address for page in pages]
        assert len(addresses) == 2001
        assert tiers.lookup(addresses) == 2001
        lookups = 0
        records = tiers.fetch(addresses).result(SECONDS)
        assert [record.address for record in records] == addresses
        assert lookups < 4 * len(addresses)

    @pytest.mark.parametrize("late_first", [True, False])
    def test_parts_that_come_in_any_order(self, late_first):
        pages, first, second = prefix(PROMPT), Late([]), Late([])
        first.lookup = lambda addresses: 3 if len(addresses) == 6 else 0  # type: ignore
        tiers = PageTiers(CacheTiers(sources=(first, second)))
        future = tiers.fetch([page.address for page in pages])
        answers = [(first, pages[:3]), (second, pages[3:])]
        for source, records in answers if late_first else reversed(answers):
            assert not future.done()
            source.future.set_result(records)
        assert future.result(SECONDS) == pages

    def test_a_cancelled_future_lets_its_pages_go(self):
        pages, late = prefix(PROMPT), Late([])
        tiers = PageTiers(CacheTiers(host_bytes=100 * PAGE, sources=(late,)))
        tiers.store(pages[:3])
        addresses = [page.address for page in pages]
        alive = [weakref.ref(page) for page in pages[:3]]
        future = tiers.fetch(addresses)
        assert future.cancel()
        assert late.future.cancelled()
        tiers.clear_memory()
        del pages
        assert not any(ref() for ref in alive), "it waits for the collector of cycles"

    @pytest.mark.parametrize("error", [MemoryError(), SystemExit(), KeyboardInterrupt(), OSError()])
    @pytest.mark.parametrize("where", ["source", "host"])
    def test_any_error_ends_the_future(self, error, where, monkeypatch):
        pages, late = prefix(PROMPT), Late([])
        tiers = PageTiers(CacheTiers(host_bytes=100 * PAGE, sources=(late,)))
        tiers.store(pages[:2])
        future = tiers.fetch([page.address for page in pages])
        if where == "source":
            late.future.set_exception(error)
            assert future.result(SECONDS) == pages[:2]
        else:

            def fail(records):
                raise error

            monkeypatch.setattr(tiers.host, "store", fail)
            late.future.set_result(pages[2:])
            assert future.result(SECONDS) == pages

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
