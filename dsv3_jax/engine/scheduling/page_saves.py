"""Pages that are to be copied to a store outside of the device, because others may need them later.

Every page that the prefix cache indexes is copied once, when logits that depend on it are known to
be finite. Its copy is launched before the step that is planned next, and so before any other
request can get the page. Nothing waits for it, and an evicted page needs no copy. Pure Python.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

from dsv3_jax.engine.scheduling.page_allocator import PageAllocator
from dsv3_jax.engine.scheduling.prefix_loads import PageStore
from dsv3_jax.engine.scheduling.step_plan import PageSave, ScheduledRequest


class PageSaves:
    """Pages that were verified since the last plan."""

    def __init__(self, store: PageStore):
        self._store = store
        self._pending: list[PageSave] = []

    def __len__(self) -> int:
        """Number of pages that no plan has included yet."""
        return len(self._pending)

    def add(
        self,
        request: ScheduledRequest,
        tokens: Sequence[int],
        numbers: range,
        verified: Collection[int],
    ) -> None:
        """Adds the pages of a request that have just been verified.

        Args:
          tokens: its first tokens: all that these pages depend on.
          numbers: numbers of its pages that were verified.
          verified: pages to add. The others were verified before, or are copies of another
            request's pages.
        """
        request.addresses = self._store.addresses(tokens, request.addresses)
        parts = self._store.parts
        for number in numbers:
            if (page := request.pages[number]) in verified:
                addresses = request.addresses[number * parts : (number + 1) * parts]
                save = PageSave(page, tuple(addresses), self._store.identity)
                self._pending.append(save)

    def take(self, count: int) -> tuple[PageSave, ...]:
        """Returns the first ``count`` pages. The caller launches their copies."""
        taken, self._pending = self._pending[:count], self._pending[count:]
        return tuple(taken)

    def drop_evicted(self, shards: Iterable[PageAllocator]) -> None:
        """Gives up copies of pages that have left the index: nothing can be found after them."""
        if self._pending:
            shards = list(shards)
            is_indexed = [any(s.is_indexed(save.page) for s in shards) for save in self._pending]
            self._pending = list(itertools.compress(self._pending, is_indexed))

    def clear(self) -> None:
        """Gives up all copies that were not launched."""
        self._pending.clear()

    def check_integrity(self, shards: Iterable[PageAllocator]) -> None:
        """Raises AssertionError if a page lost its contents before its copy was launched."""
        shards = list(shards)
        for save in self._pending:
            assert any(pages.is_indexed(save.page) for pages in shards), "a page was evicted"
            assert len(save.addresses) == self._store.parts, "a page lacks an address"
