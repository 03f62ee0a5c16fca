"""Protocols of the stores of page records, such as host memory, a disk or another process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from dsv3_jax.pages.address import PageAddress
from dsv3_jax.pages.record import PageRecord


class PageSource(Protocol):
    """Gives records of pages. Its methods can be called from any thread and return at once."""

    name: str
    """Its name in statistics, for example ``host``."""

    def lookup(self, addresses: Sequence[PageAddress]) -> int:
        """Returns how many leading pages it seems to have. :meth:`fetch` may find fewer, since
        pages can be evicted or damaged."""
        ...

    def fetch(self, addresses: Sequence[PageAddress]) -> Future[list[PageRecord]]:
        """Returns the records of leading pages that it has, in order; perhaps none.

        A page that is missing or damaged, or that the source could not get in time, ends the list.
        The future has no error. The caller checks each record with :meth:`PageRecord.check`.
        """
        ...


class PageSink(Protocol):
    """Takes records of pages. Its methods can be called from any thread."""

    def store(self, records: Sequence[PageRecord]) -> None:
        """Keeps records, or drops them if it has no room. Returns at once."""


@dataclasses.dataclass(frozen=True)
class TierStats:
    """Figures of one source. Counts are totals since it was made."""

    name: str
    hit_pages: int = 0
    """Pages that were fetched from it."""
    hit_bytes: int = 0
    stored_pages: int = 0
    """Pages that it did not have before."""
    stored_bytes: int = 0
    dropped_pages: int = 0
    """Pages that it could not keep, because it was too slow or its disk failed."""
    damaged_pages: int = 0
    """Pages that were refused and deleted. Requests computed them again."""
    used_bytes: int = 0
    """Bytes that it occupies now."""

    def plus(
        self,
        *,
        hits: Sequence[PageRecord] = (),
        stored: Sequence[PageRecord] = (),
        dropped: int = 0,
        damaged: int = 0,
        used: int = 0,
    ) -> TierStats:
        """Returns the figures after some events.

        Args:
          used: bytes that it occupies in addition.
        """
        return TierStats(
            self.name,
            hit_pages=self.hit_pages + len(hits),
            hit_bytes=self.hit_bytes + sum(record.num_bytes for record in hits),
            stored_pages=self.stored_pages + len(stored),
            stored_bytes=self.stored_bytes + sum(record.num_bytes for record in stored),
            dropped_pages=self.dropped_pages + dropped,
            damaged_pages=self.damaged_pages + damaged,
            used_bytes=self.used_bytes + used,
        )

    def since(self, before: TierStats) -> TierStats:
        """Returns the figures with totals counted from an earlier moment."""
        totals = {
            field.name: getattr(self, field.name) - getattr(before, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("name", "used_bytes")
        }
        return dataclasses.replace(self, **totals)
