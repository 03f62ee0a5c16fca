"""One data-parallel shard as the scheduler sees it: its slots, its pages, its running requests.

A layout with data-parallel attention runs each request on one shard, that is on the devices that
share one part of the batch. Slots are numbered from 0 on every shard. Page numbers are those of the
whole cache, so that a page of another shard is noticed.

A step takes as long as on its most loaded shard, so that shards should have equal loads. A request
stays on its shard until it ends or is preempted, because its pages are there. Two figures make a
shard slow: decoding reads its used pages, and every running request costs something by itself. Both
are counted in tokens of the cache, see :func:`shard_load`.

A shard whose prefix cache has the beginning of the prompt saves the prefill of these tokens, once.
That is worth ``HIT_WORTH`` times as many tokens of load: :func:`choose_shard` takes the shard with
the smallest ``load - HIT_WORTH * hit``. A popular prefix therefore attracts requests to its shard
until others are that much less loaded. Then one of them computes the prefix as well, and from then
on they share the requests.

Prefill needs no figure of its own. A step prefills a bounded number of chunks on each shard, and
the scheduler admits a request only to a shard that has chunks left in this step. Prompts thus wait
in one queue before all shards, and not on a shard whose earlier prompts are long: tokens balance
themselves, as by :func:`sharding.balancers.assign_prefill`.

:mod:`sharding.balancers` assigns whole batches of requests at once, and knows no prefixes.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any

from dsv3_jax.engine.scheduling.page_allocator import PageAllocator
from dsv3_jax.engine.scheduling.step_plan import (
    Chunk,
    PageLoad,
    Phase,
    ScheduledRequest,
    SchedulerConfig,
    ShardPlan,
)
from dsv3_jax.engine.scheduling.stored_pages import PageSaves, PrefixLoads, SwapSpace

REQUEST_TOKENS = 256
"""Tokens of the cache that cost a decode step as much as one more request."""

HIT_WORTH = 2
"""Tokens of load that one token found in the prefix cache outweighs. A token takes longer to
prefill than to read once, but it is read again in every later step."""


def shard_load(used_tokens: int, running: int) -> int:
    """Returns the load of a shard by its used tokens and running requests, in tokens."""
    return used_tokens + REQUEST_TOKENS * running


def choose_shard(
    loads: Sequence[int], hit_with_room: Callable[[int], int | None], most_hit: int
) -> int | None:
    """Returns the shard for one request, or None if no shard has room for it now. Equal costs go to
    the smaller load, then to the lower shard number: the same arguments give the same shard.
    ``hit_with_room`` returns the prompt tokens, at most ``most_hit``, in the prefix cache of a
    shard, or None if the shard has no room. Only shards that can still be chosen are asked."""
    best: int | None = None
    best_cost = 0
    for shard in sorted(range(len(loads)), key=lambda shard: (loads[shard], shard)):
        if best is not None and loads[shard] - HIT_WORTH * most_hit >= best_cost:
            break  # the shards that follow have higher loads still
        hit = hit_with_room(shard)
        if hit is None:
            continue
        cost = loads[shard] - HIT_WORTH * hit
        if best is None or cost < best_cost:
            best, best_cost = shard, cost
    return best


class SchedulerShard:
    """Slots, pages and running requests of one shard.

    Args:
      loads: pages that waiting requests read from a store.
      saves: pages that running requests write to a store.
      requeue: takes a preempted request once no step in flight refers to it.
    """

    def __init__(
        self,
        number: int,
        config: SchedulerConfig,
        pages: PageAllocator,
        swap: SwapSpace,
        loads: PrefixLoads,
        saves: PageSaves,
        requeue: Callable[[ScheduledRequest], None],
    ):
        self.number = number
        self.pages = pages
        self.swap = swap
        self.running: list[ScheduledRequest] = []  # by order; the last one is preempted first
        # Ended or preempted requests whose steps are still in flight keep their slots and pages.
        self.retiring: list[ScheduledRequest] = []
        self.preemptions = 0
        self._config = config
        self._free_slots = list(reversed(range(config.max_running)))
        self._growing = 0  # running requests that may need more pages
        self._loads = loads
        self._saves = saves
        self._requeue = requeue
        self._page_loads: list[PageLoad] = []  # of requests that this step admits

    @property
    def has_free_slot(self) -> bool:
        """Whether it can admit another request."""
        return bool(self._free_slots)

    @property
    def load(self) -> int:
        """Its load, in tokens of the cache."""
        return shard_load(self.pages.used * self.pages.page_size, len(self.running))

    def hit_with_room(self, request: ScheduledRequest) -> list[int] | None:
        """Returns the cached pages that the request's tokens begin with, or None if the shard has
        no room for the request now. Nothing changes."""
        if not self._free_slots or not self.can_be_swapped(request):
            return None
        hit = self._cached_prefix(request)
        needed = self._pages_at_admission(request) - len(hit)
        # Pages that running requests will soon need are left to them: one for each.
        return hit if self.pages.available_beside(hit) >= needed + self._growing else None

    def can_be_swapped(self, request: ScheduledRequest) -> bool:
        """Whether host memory has room if this request runs too."""
        if not self.swap.exists or request in self.swap:
            return True
        started = [*self.running, *self.retiring, *self.swap.counts]
        longest = [self._most_pages(each) for each in (*started, request)]
        return self.swap.has_room(self.pages.num_pages, longest)

    def admit(self, request: ScheduledRequest, hit: list[int]) -> int:
        """Gives a request its slot and pages, ``hit`` first. Returns how many come from a store."""
        self.pages.reuse(hit)
        pages = self.pages.allocate(self._pages_at_admission(request) - len(hit))
        assert pages is not None, "the shard has no room"
        request.pages = [*hit, *pages]
        request.shard = self.number
        request.slot = self._free_slots.pop()
        loaded: list[tuple[Any, ...]] = []
        if request in self.swap:
            self.swap.take(request, request.slot, request.pages, len(hit))
            request.phase = request.resumes_in
        else:
            request.phase = Phase.PREFILL
            request.is_slot_ready = False
            request.rewind = 0  # the slot will have the known tokens alone
            loaded = self._loads.take(request, len(hit))
            self._page_loads += map(PageLoad, request.pages[len(hit) :], loaded)
            request.computed = (len(hit) + len(loaded)) * self.pages.page_size
            request.published, request.verified = len(hit), 0
            request.is_broken = False
            request.generation = self.pages.generation
        bisect.insort(self.running, request)
        self._growing += self._may_grow(request)
        return len(loaded)

    def plan_decodes(self) -> list[ScheduledRequest]:
        """Returns the requests that decode in the next step, each with pages for it."""
        planned: list[ScheduledRequest] = []
        for request in list(self.running):
            if request.phase is not Phase.DECODE or request.least_length >= request.max_length:
                continue  # it reaches its limit with the steps in flight
            if request.is_serial and request.decode_steps_in_flight:
                continue
            if self._grow(request, request.greatest_length + request.drafts):
                planned.append(request)
        return planned

    def plan_prefills(self, most: int) -> list[Chunk]:
        """Returns up to ``most`` chunks of prompts that are partly prefilled."""
        chunks: list[Chunk] = []
        for request in self.running:
            if request.phase is Phase.PREFILL:
                chunks += self.plan_chunks(request, most - len(chunks))
        return chunks

    def plan_chunks(self, request: ScheduledRequest, most: int) -> list[Chunk]:
        """Returns up to ``most`` chunks of a request."""
        chunks = []
        end = len(request.tokens)
        while len(chunks) < most and request.computed < end:
            start, is_first = request.computed, not request.is_slot_ready
            count = min(self._config.chunk_tokens, end - start)
            is_last = start + count == end
            chunks.append(Chunk(request, _slot(request), start, count, is_first, is_last))
            request.is_slot_ready = True
            request.computed += count
            if is_last:
                request.phase = Phase.DECODE
        # The device runs steps in order, so a later step can already read these pages.
        self._publish(request, request.computed)
        return chunks

    def plan(self, decodes: Sequence[ScheduledRequest], chunks: Sequence[Chunk]) -> ShardPlan:
        """Returns the plan of a step, with the slots and drafts of now and the copies before it."""
        swap_outs, swap_ins = self.swap.planned()
        plan = ShardPlan(
            decodes=tuple(decodes),
            slots=tuple(map(_slot, decodes)),
            drafts=tuple(r.depth.choose() if r.depth else r.drafts for r in decodes),
            rewinds=tuple(request.rewind for request in decodes),
            chunks=tuple(chunks),
            swap_outs=tuple(swap_outs),
            swap_ins=tuple(swap_ins),
            loads=tuple(self._page_loads),
        )
        for request in decodes:
            request.rewind = 0
        self._page_loads.clear()
        return plan

    def has_pages(self, requests: Sequence[ScheduledRequest], steps: int) -> bool:
        """Returns whether there are pages for ``steps`` decode steps of these requests."""
        return sum(self._missing(each, steps) for each in requests) <= self.pages.available

    def add_pages(self, requests: Sequence[ScheduledRequest], steps: int) -> None:
        """Gives each request its pages for ``steps`` decode steps. There must be enough."""
        counts = [self._missing(request, steps) for request in requests]
        pages = self.pages.allocate(sum(counts))
        assert pages is not None, "the shard has too few pages"
        for request, count in zip(requests, counts, strict=True):
            self._add(request, [pages.pop() for _ in range(count)])

    def publish_decoded(self, request: ScheduledRequest) -> None:
        """Indexes the pages that a decoding request has filled, from finite logits."""
        if self._config.aligned_prefixes:
            return  # a prefill would round the generated tokens otherwise
        # The newest token is not in the cache yet. With an MTP layer, neither are its entries of
        # the newest decode step.
        lag = 1 + self.pages.lookahead * (1 + request.drafts)
        self._publish(request, len(request.tokens) - lag)
        self.verify(request, len(request.tokens) - lag)

    def verify(self, request: ScheduledRequest, written: int) -> None:
        """Notes that logits of the first ``written`` entries are finite, and saves full pages."""
        first, last = request.verified, min(written // self.pages.page_size, request.published)
        if last <= first or request.generation != self.pages.generation:
            return
        request.verified = last
        verified = set(self.pages.verify(request.pages[first:last]))
        if verified:
            tokens = request.tokens[: last * self.pages.page_size + self.pages.lookahead]
            self._saves.add(request, tokens, range(first, last), verified)

    def retract(self, request: ScheduledRequest) -> None:
        """Removes the unverified pages of a request whose logits are not finite from the index."""
        request.is_broken = True
        self.pages.retract(request.pages)

    def preempt(self, request: ScheduledRequest) -> None:
        """Gives up a running request, which is queued again."""
        self._stop(request)
        request.resumes_in = request.phase
        request.phase = Phase.WAITING
        request.preemptions += 1
        self.preemptions += 1
        self.retiring.append(request)
        self.retire()

    def end(self, request: ScheduledRequest) -> None:
        """Ends a running request. Its slot and pages are free once its steps are reported."""
        self._stop(request)
        self.retiring.append(request)

    def retire(self) -> None:
        """Frees the slots and pages of retiring requests without steps in flight."""
        for request in [r for r in self.retiring if not r.dispatches_in_flight]:
            self.retiring.remove(request)
            if self.swap.exists and request.phase is Phase.WAITING:
                decodes = request.resumes_in is Phase.DECODE
                written = self.pages.pages_for(len(request.tokens) if decodes else request.computed)
                self.swap.put(request, _slot(request), request.pages[:written])
            else:
                request.computed = request.published = request.verified = 0
            self.pages.release(request.pages)
            self._free_slots.append(_slot(request))
            request.pages, request.slot, request.shard = [], None, None
            if request.phase is Phase.WAITING:
                self._requeue(request)

    def check_idle(self) -> None:
        """Raises AssertionError if a slot or page is in use though no request is left."""
        assert self.pages.used == 0, "an idle engine holds pages"
        assert len(self._free_slots) == self._config.max_running, "an idle engine holds slots"
        assert not self.swap.counts, "an idle engine holds host memory"
        assert not self._page_loads, "an idle engine loads pages"

    def check_integrity(self) -> None:
        """Raises AssertionError if slots, pages, lists and the requests contradict each other."""
        owners = [*self.running, *self.retiring]
        assert all(r.shard == self.number for r in owners), "a request is on another shard"
        self.pages.check_integrity([request.pages for request in owners])
        slots = sorted([*map(_slot, owners), *self._free_slots])
        assert slots == list(range(self._config.max_running)), "a slot is lost or used twice"
        assert all(request.is_running for request in self.running)
        assert all(not request.is_running for request in self.retiring)
        assert all(request.dispatches_in_flight > 0 for request in self.retiring)
        orders = [request.order for request in self.running]
        assert orders == sorted(orders), "a queue is out of order"
        growing = sum(map(self._may_grow, self.running))
        assert self._growing == growing, "requests that may grow are miscounted"
        for request in self.running:
            room = len(request.pages) * self.pages.page_size
            assert request.computed <= room, "a request has written past its pages"
            most = self._most_pages(request)
            assert len(request.pages) <= most, "a request has pages that it cannot fill"

    def _cached_prefix(self, request: ScheduledRequest) -> list[int]:
        """Returns the cached pages that a request can use in the place of its own."""
        pages = self.pages.cached_prefix(request.tokens) if request.reuses_prefix else []
        if request in self.swap:
            # It has computed its later pages itself, perhaps in another way.
            is_current = request.generation == self.pages.generation
            pages = pages[: request.published] if is_current else []
        if self._config.aligned_prefixes:
            unit = math.lcm(self._config.chunk_tokens, self.pages.page_size) // self.pages.page_size
            pages = pages[: len(pages) // unit * unit]
        return pages

    def _most_pages(self, request: ScheduledRequest) -> int:
        """Returns the number of pages with which a request reaches its limit."""
        return self.pages.pages_for(request.max_length + request.drafts)

    def _pages_at_admission(self, request: ScheduledRequest) -> int:
        return self.pages.pages_for(len(request.tokens) + 1 + request.drafts)

    def _grow(self, request: ScheduledRequest, tokens: int) -> bool:
        """Gives a request pages for ``tokens`` tokens and returns whether it has them.

        If pages are missing, it preempts the last running request, which may be this one. It never
        preempts another while pages of retiring requests are still to come: they may be enough.
        """
        missing = self.pages.pages_for(tokens) - len(request.pages)
        if missing <= 0:
            return True
        while (pages := self.pages.allocate(missing)) is None:
            if self.retiring:
                return False
            last = self.running[-1]
            assert last is not request or len(self.running) > 1, "add() refuses such requests"
            self.preempt(last)
            if last is request:
                return False
        self._add(request, pages)
        return True

    def _add(self, request: ScheduledRequest, pages: Sequence[int]) -> None:
        """Gives a running request more pages."""
        self._growing -= self._may_grow(request)
        request.pages += pages
        self._growing += self._may_grow(request)

    def _stop(self, request: ScheduledRequest) -> None:
        self.running.remove(request)
        self._growing -= self._may_grow(request)

    def _may_grow(self, request: ScheduledRequest) -> bool:
        """Returns whether a request has fewer pages than at its limit."""
        return len(request.pages) < self._most_pages(request)

    def _publish(self, request: ScheduledRequest, written: int) -> None:
        """Indexes the full pages within the first ``written`` tokens of a request."""
        if request.generation != self.pages.generation or request.is_broken:
            return
        if written < (request.published + 1) * self.pages.page_size:
            return  # most steps fill no page, and need no copy of all tokens
        known = request.tokens[: written + self.pages.lookahead]
        request.published = self.pages.publish(known, request.pages, request.published)

    def _missing(self, request: ScheduledRequest, steps: int) -> int:
        most = request.greatest_length + steps * (1 + request.drafts) + request.drafts
        most = min(most, request.max_length + request.drafts)
        return max(self.pages.pages_for(most) - len(request.pages), 0)


def _slot(request: ScheduledRequest) -> int:
    assert request.slot is not None, "the request has no slot"
    return request.slot
