"""Pages outside of the device: those that a store loads and saves, and preempted requests.

While the pages of a waiting request are loaded, requests behind it are admitted before it. When
they have come, the request is admitted as usual. The device writes them to the first of its new
pages before the step that prefills the rest, and they are indexed like pages that it computed. A
load that fails or takes too long is a miss: the prompt is computed.

The load of a new request begins at once. A preempted request, whose pages may stay in the prefix
cache until it comes back, looks only then which of them are missing, generated tokens included, and
loads these.

All loads together have a budget of bytes in host memory, from their beginning until their contents
are on the device. It is given out in the order of the queue: no load begins before one of a request
further ahead, and one further ahead takes the bytes of loads behind it. Requests whose load has to
wait for bytes count as loading, and what they lack is looked up anew when it begins. Of a prefix
that is larger than the whole budget, the beginning is loaded.

Loads own no pages of the device: only a request that is admitted has pages. Addresses and contents
are the store's own.

Every page that the prefix cache indexes is saved once, when logits that depend on it are known to
be finite. Its copy is launched before the step that is planned next, and so before any other
request can get the page. Nothing waits for it, and an evicted page needs no copy.

With a :class:`SwapSpace` a preempted request keeps all that it has computed: its pages and its slot
are copied to host memory, and later to other pages and another slot. Its further tokens are those
of an uninterrupted run, to the last bit.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from dsv3_jax.engine.scheduling.page_allocator import PageAllocator
from dsv3_jax.engine.scheduling.step_plan import PageSave, ScheduledRequest, SwapIn, SwapOut


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
    def page_bytes(self) -> int:
        """Bytes of one of the store's pages in host memory."""
        ...

    @property
    def identity(self) -> Any:
        """Identifies the model. Pages are saved under the identity at the time of their address."""
        ...

    def addresses(self, tokens: Sequence[int], known: Sequence[Any] = ()) -> list[Any]:
        """Returns the address of each page that the tokens fill. The first are ``known``."""
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
    num_bytes: int
    requests: dict[ScheduledRequest, float] = dataclasses.field(default_factory=dict)
    """With the time until which each waits."""
    writing: set[ScheduledRequest] = dataclasses.field(default_factory=set)
    """Requests that were admitted with its contents, in steps whose results are not there yet."""


class PrefixLoads:
    """The loads of waiting requests.

    Args:
      store: None if there is none, so that nothing is loaded.
      seconds: longest time that a request waits for its pages, from the beginning of its load.
      most_bytes: most bytes of all loads, at least those of a page.
    """

    def __init__(
        self,
        store: PageStore | None,
        pages: Sequence[PageAllocator],
        seconds: float,
        most_bytes: float,
    ):
        self._store = store
        self._pages = pages
        self._seconds = seconds
        self._most_bytes = most_bytes
        self.num_bytes = 0
        """Bytes of all loads now."""
        self._by_key: dict[Any, _SharedLoad] = {}
        # None: the request is in `_queue`, and waits for bytes.
        self._of: dict[ScheduledRequest, _SharedLoad | None] = {}
        self._queue: list[ScheduledRequest] = []  # sorted by order
        self._may_begin = False  # whether bytes or the head of the queue have changed

    @property
    def bytes_in_host(self) -> int | None:
        """Bytes of all loads now. None without a store."""
        return None if self._store is None else self.num_bytes

    @property
    def count(self) -> int:
        """Number of requests that have a load, or wait for its beginning."""
        return len(self._of)

    def begin(self, request: ScheduledRequest) -> None:
        """Starts to load what the store has of a new prompt, and some prefix cache has not."""
        if self._store is not None and request.reuses_prefix:
            self._begin(request, self._cached_everywhere(request), request.arrival)

    def begin_again(self, request: ScheduledRequest, cached: int, now: float) -> bool:
        """Starts to load what the store has of a preempted request's tokens, which is about to be
        admitted with ``cached`` pages of the prefix cache.

        Returns whether the request has to wait for a load. It need not if it was preempted with no
        page that the store has, or has its load already: the request is admitted with what has
        come. If meanwhile the cache has lost pages before those that were loaded, it loads from
        there; that ends, since each load begins at an earlier page.
        """
        if self._store is None or not request.preemptions or not request.reuses_prefix:
            return False
        shared = self._of.get(request)
        if shared is not None and shared.first <= cached:
            return False
        self.end(request)
        return self._begin(request, cached, now)

    def begin_queued(self, now: float) -> None:
        """Starts the loads of requests that waited for bytes, as far as these last."""
        if not self._may_begin:
            return
        self._may_begin = False
        while self._queue:
            request = self._queue.pop(0)
            del self._of[request]
            self._begin(request, self._cached_everywhere(request), now)
            if self._of.get(request, self) is None:
                return  # it is the first in the queue again

    def _begin(self, request: ScheduledRequest, first: int, now: float) -> bool:
        """Starts to load what the store has from page ``first`` on, or queues the request. Returns
        False if there is nothing to load."""
        store = self._store
        assert store is not None
        parts = store.parts
        request.addresses = store.addresses(request.tokens, request.addresses)
        # The model has to run on at least one token.
        most = (len(request.tokens) - 1) // self._pages[0].page_size
        wanted = request.addresses[first * parts : most * parts]
        page_bytes = parts * store.page_bytes
        count = int(min(store.lookup(wanted) // parts, self._most_bytes / page_bytes))
        if not count:
            return False
        wanted = wanted[: count * parts]
        key = (first, wanted[-1])
        shared = self._by_key.get(key)
        if shared is None:
            num_bytes = len(wanted) * store.page_bytes
            if not self._take_bytes(request, num_bytes):
                self._enqueue(request)
                return True
            shared = _SharedLoad(key, store.load(wanted), first, num_bytes)
            self._by_key[key] = shared
            self.num_bytes += num_bytes
        shared.requests[request] = now + self._seconds
        self._of[request] = shared
        return True

    def _cached_everywhere(self, request: ScheduledRequest) -> int:
        """Returns how many leading pages of a request the prefix caches of all shards have."""
        return min(len(each.cached_prefix(request.tokens)) for each in self._pages)

    def _take_bytes(self, request: ScheduledRequest, count: int) -> bool:
        """Returns whether a load can begin, after loads behind it were given up if bytes lack."""
        if self._queue and self._queue[0].order < request.order:
            return False
        lacking = self.num_bytes + count - self._most_bytes
        if lacking <= 0:
            return True
        idle = (each for each in self._by_key.values() if not each.writing)
        first = {shared: min(shared.requests).order for shared in idle}
        behind = [each for each in first if first[each] > request.order]
        given_up: list[_SharedLoad] = []
        for shared in sorted(behind, key=first.__getitem__, reverse=True):
            given_up.append(shared)
            lacking -= shared.num_bytes
            if lacking <= 0:
                break
        else:
            return False
        for shared in given_up:
            for each in list(shared.requests):
                self.end(each)
                self._enqueue(each)
        return True

    def _enqueue(self, request: ScheduledRequest) -> None:
        """Lets a request wait for bytes."""
        self._of[request] = None
        bisect.insort(self._queue, request)

    def is_loading(self, request: ScheduledRequest, now: float) -> bool:
        """Returns whether a request still waits for its pages."""
        if request not in self._of:
            return False
        shared = self._of[request]
        return shared is None or (shared.load.contents is None and now < shared.requests[request])

    def loading(self, now: float) -> int:
        """Returns the number of requests that still wait for their pages."""
        return sum(self.is_loading(request, now) for request in self._of)

    def take(self, request: ScheduledRequest, cached: int) -> list[tuple[Any, ...]]:
        """Returns the contents of the pages after the first ``cached`` ones, which the request will
        reuse, and ends its load. Pages that do not follow these, because some were evicted, are of
        no use. The memory of what is returned counts until :meth:`written`."""
        shared = self._of.get(request)
        if shared is None or self._store is None:
            self.end(request)
            return []
        contents, parts = shared.load.contents or (), self._store.parts
        loaded = [
            tuple(contents[begin : begin + parts])
            for begin in range(0, len(contents) - parts + 1, parts)
        ]
        taken = loaded[cached - shared.first :] if cached >= shared.first else []
        if taken:
            shared.writing.add(request)
        self.end(request)
        return taken

    def written(self, request: ScheduledRequest) -> None:
        """Frees the contents that a request was admitted with. They are on the device."""
        for shared in [each for each in self._by_key.values() if request in each.writing]:
            shared.writing.remove(request)
            self._close_unused(shared)

    def end(self, request: ScheduledRequest) -> None:
        """Ends the load of a request, if it has one."""
        if request not in self._of:
            return
        shared = self._of.pop(request)
        if shared is None:
            self._queue.remove(request)
            self._may_begin = True
        else:
            del shared.requests[request]
            self._close_unused(shared)

    def clear(self) -> None:
        """Ends all loads."""
        for request in list(self._of):
            self.end(request)

    def forget_steps(self) -> None:
        """Frees the contents of requests whose steps will never be reported."""
        for shared in list(self._by_key.values()):
            shared.writing.clear()
            self._close_unused(shared)

    def _close_unused(self, shared: _SharedLoad) -> None:
        if shared.requests or shared.writing:
            return
        shared.load.close()
        self.num_bytes -= shared.num_bytes
        self._may_begin = True
        del self._by_key[shared.key]

    def check_idle(self) -> None:
        """Raises AssertionError if a load is left though no request is."""
        left = (self._of, self._queue, self._by_key, self.num_bytes)
        assert not any(left), "an idle engine loads pages"

    def check_integrity(self, waiting: Iterable[ScheduledRequest]) -> None:
        """Raises AssertionError if a load is lost, or is of a request that does not wait."""
        assert set(self._of) <= set(waiting), "pages are loaded for a request that does not wait"
        queued = [request for request, shared in self._of.items() if shared is None]
        assert set(queued) == set(self._queue), "a request is in a queue and has a load"
        assert len(queued) == len(self._queue), "a request is queued twice"
        loads = self._by_key.values()
        assert all(each.requests or each.writing for each in loads), "nobody needs a load"
        assert {(r, id(each)) for each in loads for r in each.requests} == {
            (request, id(shared)) for request, shared in self._of.items() if shared is not None
        }, "a load is lost"
        assert all(time < math.inf for each in loads for time in each.requests.values())
        assert sum(each.num_bytes for each in loads) == self.num_bytes <= self._most_bytes


class PageSaves:
    """Pages that were verified since the last plan, and are to be copied to the store, if any."""

    def __init__(self, store: PageStore | None, pages: Sequence[PageAllocator]):
        self._store = store
        self._pages = pages
        self._pending: list[PageSave] = []

    @property
    def count(self) -> int:
        """Number of pages that no plan has included yet."""
        return len(self._pending)

    def add(
        self,
        request: ScheduledRequest,
        tokens: Sequence[int],
        numbers: range,
        verified: Collection[int],
    ) -> None:
        """Adds the pages among ``numbers`` of a request that are in ``verified``. The others were
        verified before, or are copies of another request's pages. They depend on ``tokens``."""
        if self._store is None:
            return
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

    def drop_evicted(self) -> None:
        """Gives up copies of pages that have left the index: nothing can be found after them."""
        self._pending = [save for save in self._pending if self._is_indexed(save)]

    def _is_indexed(self, save: PageSave) -> bool:
        return any(pages.is_indexed(save.page) for pages in self._pages)

    def clear(self) -> None:
        """Gives up all copies that were not launched."""
        self._pending.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError if a page lost its contents before its copy was launched."""
        for save in self._pending:
            assert self._is_indexed(save), "a page was evicted"
            assert self._store is not None
            assert len(save.addresses) == self._store.parts, "a page lacks an address"


class SwapSpace:
    """Counts the pages of swapped requests. ``num_pages`` fit into host memory; None: there is no
    such memory, and preempted requests are prefilled again."""

    def __init__(self, num_pages: int | None = None):
        self.exists = num_pages is not None
        self.num_pages = num_pages or 0
        self.counts: dict[ScheduledRequest, int] = {}
        """Pages of each request in host memory."""
        self._outs: list[SwapOut] = []
        self._ins: list[SwapIn] = []

    def __contains__(self, request: ScheduledRequest) -> bool:
        return request in self.counts

    @property
    def used(self) -> int:
        """Number of pages in host memory."""
        return sum(self.counts.values())

    def has_room(self, device_pages: int, longest: Sequence[int]) -> bool:
        """Returns whether requests that need ``longest`` pages at their greatest lengths can run
        together without filling the host memory.

        Let D and H be the pages of the device and the host, and M the largest request. If the
        requests together need at most D + H - M pages at their greatest lengths, then whenever the
        device is full and some request lacks a page, the requests in host memory use less than H -
        M pages. Any other request then fits as a whole.
        """
        most = max(longest, default=0)
        return len(longest) <= 1 or sum(longest) <= device_pages + self.num_pages - most

    def put(self, request: ScheduledRequest, slot: int, pages: Sequence[int]) -> None:
        """Plans to copy a request to host memory before anything else is written to its pages."""
        self.counts[request] = len(pages)
        assert self.used <= self.num_pages, "has_room() admits no more requests than fit"
        self._outs.append(SwapOut(request, slot, tuple(pages)))

    def take(self, request: ScheduledRequest, slot: int, pages: Sequence[int], shared: int) -> None:
        """Plans to copy a request back to ``pages``. The first ``shared`` ones need no copy."""
        count = self.counts.pop(request)
        self._ins.append(SwapIn(request, slot, tuple(pages[:count]), min(shared, count)))

    def drop(self, request: ScheduledRequest) -> None:
        """Removes a request that has ended, if it is here."""
        if self.counts.pop(request, None) is not None:
            self._outs = [swap for swap in self._outs if swap.request is not request]

    def planned(self) -> tuple[list[SwapOut], list[SwapIn]]:
        """Returns the copies that no plan has included yet."""
        planned = self._outs, self._ins
        self._outs, self._ins = [], []
        return planned

    def check_integrity(self, waiting: Iterable[ScheduledRequest]) -> None:
        """Raises AssertionError if a request is here that does not wait, or there are too many."""
        assert set(self.counts) <= set(waiting), "a request in host memory does not wait"
        assert self.used <= self.num_pages, "more pages in host memory than fit"
        assert {swap.request for swap in self._outs} <= set(self.counts)
        assert not self._ins, "a request comes back without a plan"
