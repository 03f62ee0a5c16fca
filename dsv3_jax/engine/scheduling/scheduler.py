"""Decides what the next step computes: which requests decode, which prompt chunks are prefilled.

The scheduler is pure Python. It knows tokens, slots and page numbers, and no device: the caller
dispatches each :class:`StepPlan` and reports its results later. Results may be one or more steps
late, so that the device never waits for the host. The scheduler then plans with bounds: a request
gains at least one token in each decode step in flight, and at most one more than its drafts. If it
ends on the device before that, later steps compute nothing for it, and its plans cost only padding.

A step is planned in this order:

1. Requests whose deadline has passed end, and so do cancelled ones.
2. Every request whose prompt is prefilled decodes. If no page is left for it, the last request in
   the order below is preempted: it gives its pages back and is prefilled again later, except for
   what the prefix cache or a store still has, or with a :class:`SwapSpace` goes on from host
   memory. A request with a grammar decodes only when its newest token is known.
3. Prompts that are partly prefilled continue, chunk by chunk, within the token budget.
4. Waiting requests are admitted while slots, pages and budget last. Nobody overtakes the first one
   that does not fit, so that none starves, except requests in host memory if it lacks room there:
   only their return gives it room. Requests whose pages are being loaded from a store are passed
   over, see :class:`PrefixLoads`.

Requests are ordered by ``arrival + priority * priority_seconds``: a request with priority 1 is
treated as if it had arrived that many seconds later. The order of two requests never changes, so
that a low priority delays a request and cannot starve it.

With data-parallel attention every shard has its own slots, pages and budget, see
:class:`SchedulerShard`. There is one waiting queue. A request gets its shard when it is admitted,
from :func:`choose_shard`; after a preemption it may get another one.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from dsv3_jax.engine.scheduling.page_allocator import PageAllocator
from dsv3_jax.engine.scheduling.scheduler_shard import SchedulerShard, choose_shard
from dsv3_jax.engine.scheduling.step_plan import (
    Chunk,
    End,
    PageSave,
    Phase,
    ScheduledRequest,
    SchedulerConfig,
    StepLimits,
    StepPlan,
)
from dsv3_jax.engine.scheduling.stored_pages import PageSaves, PageStore, PrefixLoads, SwapSpace


class QueueFullError(RuntimeError):
    """The waiting queue holds as many requests as it may."""


class Scheduler:
    """Queues, admission, chunked prefill and preemption.

    Args:
      pages: the pages of each shard. All shards have equally many.
      swaps: host memory of each shard for preempted requests, which come back to the same shard.
      store: pages outside of the device, to load prompts from and to save indexed pages to.
      load_seconds: longest time that a request waits for pages of the store.
      load_bytes: most bytes in host memory of pages that are loaded for waiting requests.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pages: Sequence[PageAllocator],
        swaps: Sequence[SwapSpace] | None = None,
        *,
        store: PageStore | None = None,
        load_seconds: float = math.inf,
        load_bytes: float = math.inf,
    ):
        self.config = config
        self.loads = PrefixLoads(store, pages, load_seconds, load_bytes)
        self._saves = PageSaves(store, pages)
        self._limits = config.limits
        self.waiting: list[ScheduledRequest] = []  # by order
        self.shards = [
            SchedulerShard(number, config, each, swap, self.loads, self._saves, self._enqueue)
            for number, (each, swap) in enumerate(
                zip(pages, swaps or [SwapSpace() for _ in pages], strict=True)
            )
        ]
        self._next_deadline = math.inf  # no unfinished request has an earlier one
        self._has_cancelled = False
        self.prefix_hit_tokens = 0
        self.prefix_queried_tokens = 0
        self.loaded_tokens = 0
        self.reloaded_tokens = 0

    @property
    def running(self) -> list[ScheduledRequest]:
        """The requests that have slots, shard by shard."""
        return [request for shard in self.shards for request in shard.running]

    @property
    def preemptions(self) -> int:
        """Number of preemptions so far."""
        return sum(shard.preemptions for shard in self.shards)

    @property
    def has_room(self) -> bool:
        """Whether there are more free slots than waiting requests."""
        taken = sum(len(shard.running) + len(shard.retiring) for shard in self.shards)
        return taken + len(self.waiting) < self._limits.running * len(self.shards)

    @property
    def is_idle(self) -> bool:
        """Whether no request waits, runs or has steps in flight."""
        return not self.waiting and not any(s.running or s.retiring for s in self.shards)

    @property
    def unfinished(self) -> list[ScheduledRequest]:
        """The requests that are not at their end. Preempted ones with steps in flight come last."""
        return [*self.waiting, *self.running, *self._preempted()]

    def add(self, *requests: ScheduledRequest) -> None:
        """Puts new requests into the waiting queue: all of them, or none if it raises."""
        pages = self.shards[0].pages
        for request in requests:
            if pages.pages_for(request.max_length + request.drafts) > pages.num_pages:
                share = f", divided by {len(self.shards)} shards" if len(self.shards) > 1 else ""
                raise ValueError(
                    f"request: expected at most {pages.num_pages * pages.page_size} tokens "
                    f"(cache_tokens{share}), got {request.max_length} (prompt and max_new_tokens)"
                )
        room = self.config.max_waiting - len(requests)
        if room < 0:
            raise ValueError(
                f"requests: expected at most {self.config.max_waiting} (max_waiting), got "
                f"{len(requests)}"
            )
        if len(self.waiting) > room:
            raise QueueFullError(
                f"waiting queue: expected fewer than {room + 1} requests, got "
                f"{len(self.waiting)}; try again later"
            )
        with contextlib.ExitStack() as unless_added:
            for request in requests:
                request.order = request.arrival + request.priority * self.config.priority_seconds
                unless_added.callback(self.loads.end, request)
                self.loads.begin(request)
            unless_added.pop_all()
        for request in requests:
            self._enqueue(request)
            self._next_deadline = min(self._next_deadline, request.deadline)

    def limit(self, limits: StepLimits) -> None:
        """Sets the limits of the next steps."""
        for name, value, largest in zip(limits._fields, limits, self.config.limits, strict=True):
            if not 1 <= value <= largest:
                raise ValueError(f"{name}: expected 1 to {largest}, got {value}")
        self._limits = limits

    def cancel(self, request: ScheduledRequest) -> None:
        """Ends a request at the next call of :meth:`schedule`."""
        request.is_cancelled = self._has_cancelled = True

    def schedule(
        self, now: float, *, max_decode_steps: int = 1, depth: int | None = None
    ) -> tuple[StepPlan | None, list[tuple[ScheduledRequest, End]]]:
        """Plans the next dispatch, which the caller has to launch: None if there is nothing to
        compute. Also returns the requests that ended here. ``max_decode_steps`` and ``depth``
        (None: the most) bound its decode steps, if it prefills nothing, and their drafts."""
        ended = self._end_overdue(now)
        unsaved = self._saves.count  # pages that this plan's own chunks fill are saved by the next
        separate = self.config.separate
        decodes = [[] if separate else shard.plan_decodes() for shard in self.shards]
        chunks = [shard.plan_prefills(self._limits.chunks) for shard in self.shards]
        self._admit(decodes, chunks, now)
        if separate and not any(chunks):
            decodes = [shard.plan_decodes() for shard in self.shards]
        if not any(decodes) and not any(chunks):
            self._saves.drop_evicted()
            return None, ended
        steps = 1 if any(chunks) else self._extend(decodes, max_decode_steps)
        plan = StepPlan(
            tuple(map(SchedulerShard.plan, self.shards, decodes, chunks)),
            steps,
            depth,
            self._saves.take(unsaved),
        )
        self._saves.drop_evicted()
        for request in plan.decodes:
            request.decode_steps_in_flight += steps
        for chunk in plan.chunks:
            if chunk.is_last:
                chunk.request.decode_steps_in_flight += 1
        for request in plan.requests:
            request.dispatches_in_flight += 1
        return plan, ended

    def report(
        self,
        plan: StepPlan,
        new_tokens: Mapping[ScheduledRequest, Sequence[int]],
        finished: Collection[ScheduledRequest],
        broken: Collection[ScheduledRequest] = (),
        finite: Mapping[ScheduledRequest, int] = MappingProxyType({}),
    ) -> None:
        """Takes the results of a dispatched plan, see :class:`StepGains`. Tokens are dropped if
        their request has ended in the meantime, and kept if it was preempted."""
        for request in plan.decodes:
            request.decode_steps_in_flight -= plan.decode_steps
        for chunk in plan.chunks:
            if chunk.is_last:
                chunk.request.decode_steps_in_flight -= 1
            if chunk.is_first:
                self.loads.written(chunk.request)
        for request in broken:
            self._shard_of(request).retract(request)
        ends = {chunk.request: len(chunk.request.tokens) for chunk in plan.chunks if chunk.is_last}
        for request, length in {**finite, **ends}.items():
            if not request.is_broken:
                self._shard_of(request).verify(request, length)
        # Not all that decode: the results of a request's last chunk may still be in flight.
        decoded = {r for r in (*plan.decodes, *ends) if not r.is_broken}
        for request in plan.requests:
            request.dispatches_in_flight -= 1
            if request.phase is not Phase.ENDED:
                request.tokens.extend(new_tokens.get(request, ()))
                if request.phase is Phase.DECODE and request in decoded:
                    self._shard_of(request).publish_decoded(request)
                if request in finished:
                    self.end(request)
        for shard in self.shards:
            shard.retire()

    def end(self, request: ScheduledRequest) -> None:
        """Ends a request now. Its slot and pages are free once its steps in flight are reported."""
        if request.phase is Phase.WAITING and request in self.waiting:
            self.waiting.remove(request)
        elif request.is_running:
            self._shard_of(request).end(request)
        request.phase = Phase.ENDED
        self.loads.end(request)
        for shard in self.shards:
            shard.swap.drop(request)
            shard.retire()

    def take_saves(self) -> tuple[PageSave, ...]:
        """Returns the pages to copy to the store if there is no plan to include them."""
        return self._saves.take(self._saves.count)

    def clear_prefix_cache(self) -> None:
        """Empties the prefix index of every shard. Waiting requests load no pages."""
        for shard in self.shards:
            shard.pages.clear()
        self.loads.clear()
        self._saves.clear()

    def end_all(self) -> None:
        """Ends every request now. The results of steps in flight must not be reported any more."""
        retiring = [request for shard in self.shards for request in shard.retiring]
        for request in [*self.unfinished, *retiring]:
            request.dispatches_in_flight = request.decode_steps_in_flight = 0
            self.end(request)
        self.loads.forget_steps()
        self._saves.clear()

    def check_idle(self) -> None:
        """Raises AssertionError if a slot or page is in use though no request is left."""
        assert self.is_idle, "an idle engine has requests"
        for shard in self.shards:
            shard.check_idle()
        self.loads.check_idle()

    def check_integrity(self) -> None:
        """Raises AssertionError if slots, pages, queues and the requests contradict each other."""
        for shard in self.shards:
            shard.check_integrity()
            shard.swap.check_integrity(self.waiting)
        for request in self.waiting:
            assert request.phase is Phase.WAITING
            assert request.shard is request.slot is None, "a waiting request has a slot"
            assert not request.pages, "a waiting request has pages"
        self.loads.check_integrity(self.waiting)
        self._saves.check_integrity()
        orders = [request.order for request in self.waiting]
        assert orders == sorted(orders), "the waiting queue is out of order"

    def _enqueue(self, request: ScheduledRequest) -> None:
        bisect.insort(self.waiting, request)

    def _shard_of(self, request: ScheduledRequest) -> SchedulerShard:
        assert request.shard is not None, "the request has no shard"
        return self.shards[request.shard]

    def _end_overdue(self, now: float) -> list[tuple[ScheduledRequest, End]]:
        ended: list[tuple[ScheduledRequest, End]] = []
        if not self._has_cancelled and now < self._next_deadline:
            return ended  # without a look at every request
        for request in self.unfinished:
            if request.is_cancelled:
                ended.append((request, "cancelled"))
            elif now >= request.deadline:
                ended.append((request, "timeout"))
        for request, _ in ended:
            self.end(request)
        self._has_cancelled = False
        self._next_deadline = min((r.deadline for r in self.unfinished), default=math.inf)
        return ended

    def _preempted(self) -> list[ScheduledRequest]:
        """Returns the preempted requests that wait for the results of their last steps."""
        retiring = [request for shard in self.shards for request in shard.retiring]
        return [request for request in retiring if request.phase is Phase.WAITING]

    def _admit(
        self, decodes: Sequence[list[ScheduledRequest]], chunks: Sequence[list[Chunk]], now: float
    ) -> None:
        """Admits waiting requests, and adds their work to that of each shard."""
        self.loads.begin_queued(now)
        while (request := self._next_waiting(now)) is not None:
            if any(each.order <= request.order for each in self._preempted()):
                return  # that one comes first
            rooms = [self._limits.chunks - len(planned) for planned in chunks]
            choice = self._shard_with_room(request, rooms)
            if choice is None:
                return
            shard, hit = choice
            if self.loads.begin_again(request, len(hit), now):
                continue
            self.waiting.remove(request)
            loaded = shard.admit(request, hit) * shard.pages.page_size
            if request.preemptions:
                self.reloaded_tokens += loaded
            else:
                self.loaded_tokens += loaded
                request.cached_tokens = request.computed
                self.prefix_hit_tokens += request.computed
                self.prefix_queried_tokens += len(request.tokens)
            if request.phase is Phase.DECODE:  # it comes back from host memory
                # It may share pages that chunks of this step write. MTP entries are read before.
                if not chunks[shard.number]:
                    decodes[shard.number].append(request)
                continue
            chunks[shard.number].extend(shard.plan_chunks(request, rooms[shard.number]))

    def _next_waiting(self, now: float) -> ScheduledRequest | None:
        """Returns the first waiting request whose pages are not being loaded, or the first one in
        host memory if that one lacks room there on every shard that has a slot for it."""
        first = next((r for r in self.waiting if not self.loads.is_loading(r, now)), None)
        free = [shard for shard in self.shards if shard.has_free_slot]
        if first is None or not free or any(shard.can_be_swapped(first) for shard in free):
            return first
        return next((r for r in self.waiting if any(r in shard.swap for shard in free)), first)

    def _shard_with_room(
        self, request: ScheduledRequest, rooms: Sequence[int]
    ) -> tuple[SchedulerShard, list[int]] | None:
        """Returns the shard for a request, and the cached pages that it reuses there, or None if no
        shard has room. ``rooms``: chunks that each shard can still prefill in this step."""
        home = [shard.number for shard in self.shards if request in shard.swap]
        hits: dict[int, list[int]] = {}

        def hit_with_room(number: int) -> int | None:
            shard = self.shards[number]
            is_full = rooms[number] < 1 or len(shard.running) >= self._limits.running
            if is_full or (home and number not in home):
                return None
            hit = shard.hit_with_room(request)
            if hit is None:
                return None
            hits[number] = hit
            return len(hit) * shard.pages.page_size

        loads = [shard.load for shard in self.shards]
        number = choose_shard(loads, hit_with_room, len(request.tokens))
        return None if number is None else (self.shards[number], hits[number])

    def _extend(self, decodes: Sequence[Sequence[ScheduledRequest]], most: int) -> int:
        """Gives the requests that decode on each shard pages for several steps, in a dispatch that
        prefills nothing. Returns the number of steps, at most ``most``.

        While requests wait, for a slot or for pages, no dispatch goes past the step in which one of
        its requests may reach its limit, unless ``refill_steps`` allows it or it is the only one: a
        dispatch ends with its last request.
        """
        requests = list(itertools.chain.from_iterable(decodes))
        multi_step = self.config.multi_step_decodes
        is_single = multi_step is not None and max(map(len, decodes)) > multi_step
        if is_single or any(request.is_serial for request in requests):
            return 1
        remaining = [request.max_length - request.least_length for request in requests]
        if self.waiting:
            running = sum(len(shard.running) for shard in self.shards)
            if any(shard.retiring for shard in self.shards) or len(requests) < running:
                return 1  # results in flight will free a slot
            if len(requests) > 1:
                # A step adds up to 1 + drafts tokens.
                least = [-(-n // (1 + r.drafts)) for n, r in zip(remaining, requests, strict=True)]
                most = min(most, max(min(least), self.config.refill_steps))
        steps = max(1, min(most, max(remaining)))
        work = list(zip(self.shards, decodes, strict=True))
        while steps > 1 and not all(shard.has_pages(each, steps) for shard, each in work):
            steps //= 2
        if steps > 1:
            for shard, each in work:
                shard.add_pages(each, steps)
        return steps
