"""The tiers below the device: host memory, then a disk, then other sources.

Every page that comes from the device is written to all tiers that take pages. A page that a slower
source had is kept in host memory as well. A source that raises an error has no pages, as far as its
request is concerned: the other sources are asked, and the engine goes on.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from dsv3_jax.pages.address import PageAddress
from dsv3_jax.pages.disk import DiskPages
from dsv3_jax.pages.record import PageRecord, PageSource, TierStats

logger = logging.getLogger(__name__)

_LEAST_LOAD_BYTES = 4 * 2**30


class HostMemory:
    """Keeps records until their memory is needed, least recently used first.

    A record is kept as it is, in ordinary or in pinned memory: nothing is copied. On a GPU, JAX
    itself copies ordinary memory through pinned buffers.
    """

    name = "host"

    def __init__(self, capacity: int):
        if capacity < 0:
            raise ValueError(f"host_bytes: expected 0 or more, got {capacity}")
        self._capacity = capacity
        self._records: OrderedDict[bytes, PageRecord] = OrderedDict()  # least recent first
        self._lock = threading.Lock()
        self._stats = TierStats(self.name)

    def __contains__(self, address: PageAddress) -> bool:
        record = self._records.get(address.digest)
        return record is not None and record.address == address

    def lookup(self, addresses: Sequence[PageAddress]) -> int:
        """See :class:`~dsv3_jax.pages.record.PageSource`."""
        return next((i for i, a in enumerate(addresses) if a not in self), len(addresses))

    def fetch(self, addresses: Sequence[PageAddress]) -> Future[list[PageRecord]]:
        """See :class:`~dsv3_jax.pages.record.PageSource`. The future is done."""
        records: list[PageRecord] = []
        with self._lock:
            for address in addresses[: self.lookup(addresses)]:
                records.append(self._records[address.digest])
            self._touch_all(records)
            self._stats = self._stats.plus(hits=records)
        done: Future[list[PageRecord]] = Future()
        done.set_result(records)
        return done

    def store(self, records: Sequence[PageRecord]) -> None:
        """See :class:`~dsv3_jax.pages.record.PageSink`. Evicts what has no room any more."""
        with self._lock:
            stats = self._stats
            records = [record for record in records if record.num_bytes <= self._capacity]
            for record in records:
                old = self._records.get(record.address.digest)
                self._records[record.address.digest] = record
                stats = stats.plus(used=record.num_bytes - (old.num_bytes if old else 0))
                stats = stats.plus(stored=[] if old else [record])
            self._touch_all(records)
            while stats.used_bytes > self._capacity:
                _, evicted = self._records.popitem(last=False)
                stats = stats.plus(used=-evicted.num_bytes)
            self._stats = stats

    def clear(self) -> None:
        """Drops all records."""
        with self._lock:
            self._records.clear()
            self._stats = self._stats.plus(used=-self._stats.used_bytes)

    def _touch_all(self, records: Sequence[PageRecord]) -> None:
        """Makes pages and all pages before them the most recently used, the first page last: the
        end of a prefix is evicted before its beginning. If one of them is missing, those after it
        are of no use: they become the least recently used."""
        parents = {record.address.parent for record in records}
        for record in records:
            if record.address.digest in parents:
                continue
            chain = [record]  # the first page last
            while (parent := self._records.get(chain[-1].address.parent)) is not None:
                chain.append(parent)
            is_whole = chain[-1].address.parent == record.identity
            for each in chain if is_whole else reversed(chain):
                self._records.move_to_end(each.address.digest, last=is_whole)

    def stats(self) -> TierStats:
        """Returns its figures."""
        return self._stats


@dataclasses.dataclass(frozen=True)
class CacheTiers:
    """Settings of the tiers of an engine, and how it loads pages from them."""

    host_bytes: int = 0
    """Size of the tier in host memory. It is allocated as it is used. 0 for none."""
    disk: str | os.PathLike[str] | None = None
    """Directory of the tier on disk, which several engines can share; None for none."""
    disk_bytes: int = 64 * 2**30
    """Size of all files in the directory."""
    sources: tuple[PageSource, ...] = ()
    """Other sources of pages, which are asked last."""
    load_seconds: float = 5.0
    """Longest time that a request waits for pages. After it they are computed."""
    load_bytes: int | None = None
    """Host memory for pages that are loaded for waiting requests, in the order of the queue. Pages
    of :attr:`host_bytes` count too while they are loaded. None for a quarter of it, and 4 GiB at
    least."""
    pinned: bool = False
    """Whether pages that come from the device are in pinned host memory, which the device reads and
    writes itself. The operating system cannot move it to a disk."""
    staging_bytes: int = 2**29
    """Device memory for pages that are loaded before their request can be admitted. Beyond it, they
    wait in host memory."""

    def __post_init__(self) -> None:
        if self.load_bytes is not None and self.load_bytes < 1:
            raise ValueError(f"load_bytes: expected 1 or more, got {self.load_bytes}")
        for name in ("host_bytes", "disk_bytes", "staging_bytes"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name}: expected 0 or more, got {value}")
        if not self.load_seconds > 0:
            raise ValueError(f"load_seconds: expected more than 0, got {self.load_seconds}")
        if self.pinned and not self.host_bytes:
            raise ValueError("pinned: expected host_bytes with it, got 0")
        if not (self.host_bytes or self.disk or self.sources):
            raise ValueError("tiers: expected host_bytes, disk or sources, got none of them")

    @property
    def most_load_bytes(self) -> int:
        """Most bytes of pages that are loaded for waiting requests."""
        if self.load_bytes is not None:
            return self.load_bytes
        return max(self.host_bytes // 4, _LEAST_LOAD_BYTES)


class PageTiers:
    """Stores and finds records in the tiers. A :class:`PageSource` and a :class:`PageSink`."""

    name = "tiers"

    def __init__(self, config: CacheTiers):
        self.host = HostMemory(config.host_bytes) if config.host_bytes else None
        self.disk = None if config.disk is None else DiskPages(config.disk, config.disk_bytes)
        tiers = [tier for tier in (self.host, self.disk) if tier is not None]
        self._sinks = tiers
        self._sources: list[PageSource] = [*tiers, *config.sources]

    def __contains__(self, address: PageAddress) -> bool:
        """Whether every tier that takes pages has this one, so that it need not be stored."""
        return all(address in sink for sink in self._sinks)

    @property
    def takes_pages(self) -> bool:
        """Whether any tier takes pages."""
        return bool(self._sinks)

    def lookup(self, addresses: Sequence[PageAddress]) -> int:
        """See :class:`~dsv3_jax.pages.record.PageSource`."""
        return sum(count for _, count in self._parts(addresses))

    def fetch(self, addresses: Sequence[PageAddress]) -> Future[list[PageRecord]]:
        """See :class:`~dsv3_jax.pages.record.PageSource`."""
        parts: deque[_Part] = deque()
        begin = 0
        for source, count in self._parts(addresses):
            asked = addresses[begin : begin + count]
            parts.append(_Part(source, count, _fetch(source, asked)))
            begin += count
        return _Join(parts, self.host).begin()

    def store(self, records: Sequence[PageRecord]) -> None:
        """See :class:`~dsv3_jax.pages.record.PageSink`."""
        for sink in self._sinks:
            sink.store(records)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until everything that was stored is on the disk. Returns False after ``timeout``
        seconds."""
        return self.disk is None or self.disk.flush(timeout)

    def clear_memory(self) -> None:
        """Drops all records in host memory."""
        if self.host is not None:
            self.host.clear()

    def close(self, timeout: float | None = None) -> None:
        """Writes what is stored to the disk, within ``timeout`` seconds, and frees the memory."""
        if self.disk is not None:
            self.disk.close(timeout)
        self.clear_memory()

    def stats(self) -> tuple[TierStats, ...]:
        """Returns the figures of the host memory and the disk."""
        return tuple(sink.stats() for sink in self._sinks)

    def _parts(self, addresses: Sequence[PageAddress]) -> list[tuple[PageSource, int]]:
        """Returns which source has how many pages, in order, as far as any has the next one, each
        page from the first source that has it."""
        parts: list[tuple[PageSource, int]] = []
        # Each tier has an entry (start, end): it contains pages start to end - 1, and not page end.
        # So every page is looked up once, however often the source changes.
        known = [(0, -1) for _ in self._sinks]

        def count(number: int, begin: int) -> int:
            """Returns how many pages a source has from page ``begin`` on."""
            if number >= len(known):
                return _lookup(self._sources[number], addresses[begin:])
            first, last = known[number]
            if not first <= begin <= last:
                first, last = begin, begin + _lookup(self._sources[number], addresses[begin:])
                known[number] = first, last
            return last - begin

        def has(number: int, page: int) -> bool:
            if number < len(known) and known[number][0] <= page <= known[number][1]:
                return page < known[number][1]
            return _lookup(self._sources[number], addresses[page : page + 1]) > 0

        begin = 0
        while begin < len(addresses):
            counts = (count(number, begin) for number in range(len(self._sources)))
            number, most = next(((n, c) for n, c in enumerate(counts) if c), (0, 0))
            if not most:
                break
            later = range(begin + 1, begin + most)
            end = next((p for p in later if any(has(n, p) for n in range(number))), begin + most)
            parts.append((self._sources[number], end - begin))
            begin = end
        return parts


class _Part(NamedTuple):
    source: PageSource
    pages: int
    future: Future[list[PageRecord]]


class _Join:
    """Joins the results of parts in a future, which ends whatever happens.

    Nobody who still has the future or one of its callbacks keeps pages in memory by that, not even
    until Python collects cycles: pages are large.

    Args:
      host: keeps the pages of other sources too.
    """

    def __init__(self, parts: deque[_Part], host: HostMemory | None):
        self._parts = parts
        self._host = host
        self._records: list[PageRecord] = []
        self._future: Future[list[PageRecord]] | None = Future()
        self._lock = threading.RLock()

    def begin(self) -> Future[list[PageRecord]]:
        """Returns the future."""
        future = self._future
        assert future is not None
        self._take()
        future.add_done_callback(self._give_up)
        return future

    def _take(self, _: object = None) -> None:
        """Takes the results of part after part, as far as they are there."""
        with self._lock:
            try:
                while self._parts:
                    source, count, future = self._parts[0]
                    if not future.done():
                        future.add_done_callback(self._take)
                        return
                    self._parts.popleft()
                    got = [] if future.cancelled() or future.exception() else future.result()
                    self._records.extend(got)
                    if self._host is not None and source is not self._host:
                        self._host.store(got)
                    if len(got) < count:
                        break  # later pages do not follow these
            except BaseException:  # the future has to end, whatever it is
                logger.exception("cache tiers: pages were not loaded")
            joined, records = self._future, self._records
            self._give_up()
            if joined is not None and joined.set_running_or_notify_cancel():
                joined.set_result(records)

    def _give_up(self, _: object = None) -> None:
        """Cancels what is under way, and lets go what has come."""
        with self._lock:
            left, self._parts = self._parts, deque()
            self._records, self._future = [], None
            for part in left:
                part.future.cancel()


def _lookup(source: PageSource, addresses: Sequence[PageAddress]) -> int:
    """Returns what :meth:`PageSource.lookup` returns, or 0 if it raises an error."""
    try:
        return source.lookup(addresses)
    except Exception as error:
        logger.warning("cache tiers: %s: lookup failed: %r", source.name, error)
        return 0


def _fetch(source: PageSource, addresses: Sequence[PageAddress]) -> Future[list[PageRecord]]:
    """Returns what :meth:`PageSource.fetch` returns, or no records if it raises an error."""
    try:
        return source.fetch(addresses)
    except Exception as error:
        logger.warning("cache tiers: %s: fetch failed: %r", source.name, error)
        missed: Future[list[PageRecord]] = Future()
        missed.set_result([])
        return missed
