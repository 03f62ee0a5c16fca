"""Page records in host memory, up to a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

from dsv3_jax.pages.address import PageAddress
from dsv3_jax.pages.record import PageRecord
from dsv3_jax.pages.source import TierStats


class HostMemory:
    """Keeps records until their memory is needed, least recently used first.

    A record is kept as it is, in ordinary or in pinned memory: nothing is copied. On a GPU, JAX
    itself copies ordinary memory through pinned buffers.

    Args:
      capacity: most bytes of contents.
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
        """See :class:`~dsv3_jax.pages.source.PageSource`."""
        return next((i for i, a in enumerate(addresses) if a not in self), len(addresses))

    def fetch(self, addresses: Sequence[PageAddress]) -> Future[list[PageRecord]]:
        """See :class:`~dsv3_jax.pages.source.PageSource`. The future is done."""
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
        """See :class:`~dsv3_jax.pages.source.PageSink`. Evicts what has no room any more."""
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
        """Makes pages and those before them the most recently used."""
        parents = {record.address.parent for record in records}
        for record in records:
            if record.address.digest not in parents:
                self._touch(record)

    def _touch(self, record: PageRecord) -> None:
        """Makes a page and all pages before it the most recently used, the first page last: the
        end of a prefix is evicted before its beginning. If one of them is missing, those after it
        are of no use: they become the least recently used."""
        chain = [record]  # the first page last
        while (parent := self._records.get(chain[-1].address.parent)) is not None:
            chain.append(parent)
        is_whole = chain[-1].address.parent == record.identity
        for each in chain if is_whole else reversed(chain):
            self._records.move_to_end(each.address.digest, last=is_whole)

    def stats(self) -> TierStats:
        """Returns its figures."""
        return self._stats
