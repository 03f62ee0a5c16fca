"""Protocols of the stores of page records: host memory, a disk, another process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from dsv3_jax.pages.address import PageAddress
from dsv3_jax.pages.record import PageRecord


class PageSource(Protocol):
    """Gives records of pages. Its methods can be called from any thread and return at once."""

    @property
    def name(self) -> str:
        """Its name in statistics, for example ``host``."""
        ...

    def lookup(self, addresses: Sequence[PageAddress]) -> int:
        """Returns how many leading pages it seems to have. :meth:`fetch` may find fewer, since
        pages can be evicted or damaged."""
        ...

    def fetch(self, addresses: Sequence[PageAddress]) -> Future[list[PageRecord]]:
        """Returns the records of leading pages that it has, in order; perhaps none.

        The records have passed :meth:`PageRecord.check` for these addresses. A damaged page is a
        miss and ends the list. The future can be cancelled.
        """
        ...


class PageSink(Protocol):
    """Takes records of pages. Its methods can be called from any thread."""

    def store(self, records: Sequence[PageRecord]) -> None:
        """Keeps records, or drops them if it has no room. Returns at once."""
        ...
