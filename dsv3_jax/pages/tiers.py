"""The tiers below the device: host memory, then a disk, then other sources.

Every page that comes from the device is written to all tiers that take pages. A page that a slower
source had is kept in host memory as well. A source that raises an error has no pages, as far as its
request is concerned: the other sources are asked, and the engine goes on.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future

from dsv3_jax.pages.address import PageAddress
from dsv3_jax.pages.disk import DiskPages
from dsv3_jax.pages.host_memory import HostMemory
from dsv3_jax.pages.record import PageRecord
from dsv3_jax.pages.source import PageSource, TierStats

logger = logging.getLogger(__name__)


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
    pinned: bool = False
    """Whether pages that come from the device are in pinned host memory, which the device reads and
    writes itself. The operating system cannot move it to a disk."""
    staging_bytes: int = 2**29
    """Device memory for pages that are loaded before their request can be admitted. Beyond it, they
    wait in host memory."""

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes", "staging_bytes"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name}: expected 0 or more, got {value}")
        if not self.load_seconds > 0:
            raise ValueError(f"load_seconds: expected more than 0, got {self.load_seconds}")
        if self.pinned and not self.host_bytes:
            raise ValueError("pinned: expected host_bytes with it, got 0")
        if not (self.host_bytes or self.disk or self.sources):
            raise ValueError("tiers: expected host_bytes, disk or sources, got none of them")


class PageTiers:
    """Stores and finds records in the tiers. A :class:`PageSource` and a :class:`PageSink`.

    Raises:
      OSError: the directory of the disk tier cannot be used.
    """

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
        """See :class:`~dsv3_jax.pages.source.PageSource`."""
        return sum(count for _, count in self._parts(addresses))

    def fetch(self, addresses: Sequence[PageAddress]) -> Future[list[PageRecord]]:
        """See :class:`~dsv3_jax.pages.source.PageSource`."""
        parts, begin = [], 0
        for source, count in self._parts(addresses):
            asked = addresses[begin : begin + count]
            parts.append((source, asked, _fetch(source, asked)))
            begin += count
        joined: Future[list[PageRecord]] = Future()
        records: list[PageRecord] = []

        def give_up() -> None:
            """Cancels what is under way in the sources."""
            for _, _, future in parts:
                future.cancel()

        def take(number: int) -> None:
            """Takes the results of part after part, each when it is there."""
            if number == len(parts):
                self._finish(joined, records)
                return
            source, asked, future = parts[number]

            def done(future: Future[list[PageRecord]]) -> None:
                got = [] if future.cancelled() or future.exception() else future.result()
                records.extend(got)
                if self.host is not None and source is not self.host:
                    self.host.store(got)
                if len(got) < len(asked):
                    self._finish(joined, records)
                    give_up()  # later pages do not follow these
                else:
                    take(number + 1)

            future.add_done_callback(done)

        joined.add_done_callback(lambda joined: give_up() if joined.cancelled() else None)
        take(0)
        return joined

    def store(self, records: Sequence[PageRecord]) -> None:
        """See :class:`~dsv3_jax.pages.source.PageSink`."""
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
        """Returns which source has how many pages, in order, as far as any has the next one."""
        parts: list[tuple[PageSource, int]] = []
        left = list(addresses)
        while left:
            for number, source in enumerate(self._sources):
                if count := self._count(source, self._sources[:number], left):
                    parts.append((source, count))
                    left = left[count:]
                    break
            else:
                break
        return parts

    def _count(
        self, source: PageSource, faster: Sequence[PageSource], addresses: Sequence[PageAddress]
    ) -> int:
        """Returns how many leading pages a source has that no faster one has."""
        count = _lookup(source, addresses)
        for number in range(1, count):
            if any(_lookup(each, addresses[number : number + 1]) for each in faster):
                return number
        return count

    def _finish(self, joined: Future[list[PageRecord]], records: list[PageRecord]) -> None:
        if joined.set_running_or_notify_cancel():
            joined.set_result(records)


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
