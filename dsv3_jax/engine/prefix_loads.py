"""Pages of prompts that a store outside of the device has: which are loaded, and for whom.

While the pages of a waiting request are loaded, requests behind it are admitted before it. When
they have come, the request is admitted as usual. The device writes them to the first of its new
pages before the step that prefills the rest, and they are indexed like pages that it computed. A
load that fails or takes too long is a miss: the prompt is computed.

The load of a new request begins at once. A preempted request, whose pages may stay in the prefix
cache until it comes back, looks only then which of them are missing, generated tokens included, and
loads these.

Loads own no pages of the device: only a request that is admitted has pages. Pure Python: addresses
and contents are the store's own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from dsv3_jax.engine.page_allocator import PageAllocator
from dsv3_jax.engine.step_plan import ScheduledRequest


class Load(Protocol):
    """Pages on their way from a store."""

    @property
    def contents(self) -> Sequence[Any] | None:
        """Contents of the leading pages that have come; None while they are being loaded."""
        ...

    def close(self) -> None:
        """Gives up the load, or frees its memory. Contents that were taken stay valid."""
        ...


class PageStore(Protocol):
    """Pages outside of the device. Its methods return at once."""

    @property
    def parts(self) -> int:
        """Pages of the store in a page of the scheduler: devices that share a sequence's tokens."""
        ...

    @property
    def identity(self) -> Any:
        """Identifies the model. Pages are saved under the identity at the time of their address."""
        ...

    def addresses(self, tokens: Sequence[int], known: Sequence[Any] = ()) -> list[Any]:
        """Returns the address of each of the store's pages that the tokens fill, lookahead
        included. ``known`` are the first ones, from an earlier call."""
        ...

    def lookup(self, addresses: Sequence[Any]) -> int:
        """Returns how many leading pages it seems to have."""
        ...

    def load(self, addresses: Sequence[Any]) -> Load:
        """Starts to load pages."""
        ...


@dataclasses.dataclass(eq=False)
class _SharedLoad:
    """A load for all waiting requests that begin alike."""

    key: Any
    load: Load
    first: int
    """Number of the first page that is loaded. Those before it were in the prefix cache."""
    requests: dict[ScheduledRequest, float] = dataclasses.field(default_factory=dict)
    """With the time until which each waits."""


class PrefixLoads:
    """The loads of waiting requests.

    Args:
      seconds: longest time that a request waits for its pages.
    """

    def __init__(self, store: PageStore, seconds: float):
        self._store = store
        self._seconds = seconds
        self._by_key: dict[Any, _SharedLoad] = {}
        self._of: dict[ScheduledRequest, _SharedLoad] = {}

    def __len__(self) -> int:
        """Number of requests that have a load."""
        return len(self._of)

    def begin(self, request: ScheduledRequest, pages: Iterable[PageAllocator]) -> None:
        """Starts to load what the store has of a new request's prompt and the prefix cache of some
        shard has not.

        Args:
          pages: the pages of all shards.
        """
        if not request.reuses_prefix:
            return
        pages = list(pages)
        first = min(len(each.cached_prefix(request.tokens)) for each in pages)
        self._begin(request, first, pages[0].page_size, request.arrival)

    def begin_again(
        self, request: ScheduledRequest, cached: int, page_size: int, now: float
    ) -> bool:
        """Starts to load what the store has of a preempted request's tokens, which is about to be
        admitted with ``cached`` pages of the prefix cache.

        Returns whether a load has begun. None does if it was preempted with no page that the store
        has, or has its load already: the request is admitted with what has come. If meanwhile the
        cache has lost pages before those that were loaded, it loads from there; that ends, since
        each load begins at an earlier page.
        """
        if not request.preemptions or not request.reuses_prefix:
            return False
        shared = self._of.get(request)
        if shared is not None and shared.first <= cached:
            return False
        self.end(request)
        return self._begin(request, cached, page_size, now)

    def _begin(self, request: ScheduledRequest, first: int, page_size: int, now: float) -> bool:
        """Starts to load what the store has of a request from page ``first`` on, if anything."""
        parts = self._store.parts
        request.addresses = self._store.addresses(request.tokens, request.addresses)
        # The model has to run on at least one token.
        most = (len(request.tokens) - 1) // page_size
        wanted = request.addresses[first * parts : most * parts]
        count = self._store.lookup(wanted) // parts
        if not count:
            return False
        wanted = wanted[: count * parts]
        key = (first, wanted[-1])
        shared = self._by_key.get(key)
        if shared is None:
            shared = self._by_key[key] = _SharedLoad(key, self._store.load(wanted), first)
        shared.requests[request] = now + self._seconds
        self._of[request] = shared
        return True

    def is_loading(self, request: ScheduledRequest, now: float) -> bool:
        """Returns whether a request still waits for its pages."""
        shared = self._of.get(request)
        return (
            shared is not None and shared.load.contents is None and now < shared.requests[request]
        )

    def loading(self, now: float) -> int:
        """Returns the number of requests that still wait for their pages."""
        return sum(self.is_loading(request, now) for request in self._of)

    def take(self, request: ScheduledRequest, cached: int) -> list[tuple[Any, ...]]:
        """Returns the contents of the pages after the first ``cached`` ones, which the request will
        reuse, and ends its load. Pages that do not follow these, because some were evicted, are of
        no use."""
        shared = self._of.get(request)
        if shared is None:
            return []
        contents, parts = shared.load.contents or (), self._store.parts
        self.end(request)
        loaded = [
            tuple(contents[begin : begin + parts])
            for begin in range(0, len(contents) - parts + 1, parts)
        ]
        return loaded[cached - shared.first :] if cached >= shared.first else []

    def end(self, request: ScheduledRequest) -> None:
        """Ends the load of a request, if it has one."""
        shared = self._of.pop(request, None)
        if shared is None:
            return
        del shared.requests[request]
        if not shared.requests:
            shared.load.close()
            if self._by_key.get(shared.key) is shared:
                del self._by_key[shared.key]

    def clear(self) -> None:
        """Ends all loads: the requests compute their prompts."""
        for request in list(self._of):
            self.end(request)

    def check_integrity(self, waiting: Iterable[ScheduledRequest]) -> None:
        """Raises AssertionError if a load is lost, or is of a request that does not wait."""
        assert set(self._of) <= set(waiting), "pages are loaded for a request that does not wait"
        shared = list(self._by_key.values())
        assert {id(each) for each in shared} == {id(each) for each in self._of.values()}
        assert {r for each in shared for r in each.requests} == set(self._of), "a load is lost"
        assert all(time < math.inf for each in shared for time in each.requests.values())
