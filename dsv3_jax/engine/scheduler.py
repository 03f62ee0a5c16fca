"""Decides what the next step computes: which requests decode, which prompt chunks are prefilled.

The scheduler is pure Python. It knows tokens, slots and page numbers, and no device: the caller
dispatches each :class:`StepPlan` and reports its results later. Results may be one or more steps
late, so that the device never waits for the host. The scheduler then plans with bounds: a request
with steps in flight has gained at least one token in each, and at most one more than its drafts.

A step is planned in this order:

1. Requests whose deadline has passed end, and so do cancelled ones.
2. Every request whose prompt is cached decodes. If no page is left for it, the last request in the
   order below is preempted: it gives its pages back and is prefilled again later.
3. Prompts that are partly cached continue, chunk by chunk, within the token budget.
4. Waiting requests are admitted while slots, pages and budget last. Nobody overtakes the first one
   that does not fit, so that none starves.

Requests are ordered by ``arrival + priority * priority_seconds``: a request with priority 1 is
treated as if it had arrived that many seconds later. The order of two requests never changes, so
that a low priority delays a request and cannot starve it.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence, Set
from typing import Literal

from dsv3_jax.engine.page_allocator import PageAllocator

EndReason = Literal["cancelled", "timeout"]
"""Reason for which the scheduler itself ended a request."""


class QueueFullError(RuntimeError):
    """The waiting queue holds as many requests as it may."""


class Phase(enum.Enum):
    """Stage of a request's life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


@dataclasses.dataclass(eq=False)
class ScheduledRequest:
    """A request as the scheduler sees it. The scheduler writes all fields but the first six."""

    tokens: list[int]
    """The prompt, then the generated tokens that the host has read."""
    max_length: int
    """Length at which the request ends: prompt tokens and the most new ones."""
    drafts: int = 0
    """Most draft tokens that a decode step verifies for it."""
    priority: int = 0
    """Less is more urgent."""
    arrival: float = 0.0
    """Time of submission, in seconds of the caller's clock."""
    deadline: float = math.inf
    """Time at which it ends even if it is not finished."""

    phase: Phase = Phase.WAITING
    slot: int | None = None
    """Its row in the device's state, while it is running."""
    pages: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    """Tokens whose cache entries are written, or reused, when all dispatched prefills are done."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache saved at the first admission."""
    steps_in_flight: int = 0
    """Dispatched plans that include it and whose results are not reported yet."""
    decodes_in_flight: int = 0
    """Decode steps in those plans. Each adds at least one token."""
    published: int = 0
    """Number of its pages that are in the prefix index."""
    preemptions: int = 0
    is_cancelled: bool = False
    is_slot_ready: bool = False
    """Whether a dispatched step has initialised its slot."""

    @property
    def is_running(self) -> bool:
        return self.phase in (Phase.PREFILL, Phase.DECODE)

    @property
    def least_length(self) -> int:
        """Tokens it has at least when all dispatched steps are done."""
        return len(self.tokens) + self.decodes_in_flight

    @property
    def greatest_length(self) -> int:
        """Tokens it has at most when all dispatched steps are done."""
        most = len(self.tokens) + self.decodes_in_flight * (1 + self.drafts)
        return min(most, self.max_length)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive prompt tokens of one request that a step prefills."""

    request: ScheduledRequest
    slot: int
    start: int
    """Position of the first token."""
    count: int
    is_first: bool
    """Whether the request has just been admitted, so that the step initialises its slot."""
    is_last: bool
    """Whether the chunk ends the known tokens, so that the step samples the next one."""


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The work of one dispatch."""

    decodes: tuple[ScheduledRequest, ...]
    slots: tuple[int, ...]
    """Slot of each request in ``decodes``."""
    chunks: tuple[Chunk, ...]
    decode_steps: int
    """Decode steps in the dispatch: 1 if it prefills anything."""

    @property
    def requests(self) -> list[ScheduledRequest]:
        """Every request of the plan, once."""
        return list(dict.fromkeys([*self.decodes, *(chunk.request for chunk in self.chunks)]))


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a scheduler."""

    max_running: int
    """Number of slots."""
    chunk_tokens: int
    """Most tokens in a chunk; one chunk is one segment of the compiled step."""
    max_chunks: int
    """Most chunks in a step. Its product with ``chunk_tokens`` is the prefill budget of a step."""
    max_waiting: int = 4096
    priority_seconds: float = 10.0
    """Head start, in seconds, that a request has over one with the next higher priority number."""

    def __post_init__(self) -> None:
        for name in ("max_running", "chunk_tokens", "max_chunks", "max_waiting"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value}")


class Scheduler:
    """Queues, admission, chunked prefill and preemption for one pool of slots and pages."""

    def __init__(self, config: SchedulerConfig, pages: PageAllocator):
        self.config = config
        self.pages = pages
        self.waiting: list[ScheduledRequest] = []  # sorted by _order
        self.running: list[ScheduledRequest] = []  # sorted by _order
        self.preemptions = 0
        self.prefix_hit_tokens = 0
        self.prefix_queried_tokens = 0
        self._free_slots = list(reversed(range(config.max_running)))
        # Ended or preempted requests whose steps are still in flight keep their slots and pages.
        self._retiring: list[ScheduledRequest] = []

    @property
    def is_idle(self) -> bool:
        """Whether no request waits, runs or has steps in flight."""
        return not (self.waiting or self.running or self._retiring)

    def add(self, request: ScheduledRequest) -> None:
        """Puts a new request into the waiting queue.

        Raises:
          QueueFullError: the queue is full.
          ValueError: the request could never run, because it needs more pages than there are.
        """
        if len(self.waiting) >= self.config.max_waiting:
            raise QueueFullError(
                f"waiting queue: expected fewer than {self.config.max_waiting} requests, got "
                f"{len(self.waiting)}; try again later"
            )
        needed = self._pages_for(request.max_length + request.drafts)
        if needed > self.pages.num_pages:
            raise ValueError(
                f"request: expected at most {self.pages.num_pages * self.pages.page_size} tokens "
                f"(cache_tokens), got {request.max_length} (prompt and max_new_tokens)"
            )
        bisect.insort(self.waiting, request, key=self._order)

    def cancel(self, request: ScheduledRequest) -> None:
        """Ends a request at the next call of :meth:`schedule`."""
        request.is_cancelled = True

    def schedule(
        self, now: float, *, max_decode_steps: int = 1
    ) -> tuple[StepPlan | None, list[tuple[ScheduledRequest, EndReason]]]:
        """Plans the next dispatch. The caller has to dispatch the plan.

        Args:
          now: time on the caller's clock.
          max_decode_steps: most decode steps in the dispatch if it prefills nothing.

        Returns:
          The plan, or None if there is nothing to compute, and the requests that ended here.
        """
        ended = self._end_overdue(now)
        decodes = self._plan_decodes()
        chunks = self._plan_prefills()
        chunks += self._admit(self.config.max_chunks - len(chunks))
        steps = 1
        if not chunks and decodes and not self.waiting:
            steps = self._decode_steps(decodes, max_decode_steps)
        if not decodes and not chunks:
            return None, ended
        plan = StepPlan(
            decodes=tuple(decodes),
            slots=tuple(_slot(request) for request in decodes),
            chunks=tuple(chunks),
            decode_steps=steps,
        )
        for request in decodes:
            request.decodes_in_flight += steps
        for chunk in chunks:
            if chunk.is_last:
                chunk.request.decodes_in_flight += 1
        for request in plan.requests:
            request.steps_in_flight += 1
        return plan, ended

    def report(
        self,
        plan: StepPlan,
        new_tokens: Mapping[ScheduledRequest, Sequence[int]],
        finished: Set[ScheduledRequest],
    ) -> None:
        """Takes the results of a dispatched plan.

        Args:
          new_tokens: tokens that each request of the plan gained. They are dropped if the request
            has ended in the meantime, and kept if it was preempted.
          finished: requests that need no further step.
        """
        for request in plan.decodes:
            request.decodes_in_flight -= plan.decode_steps
        for chunk in plan.chunks:
            if chunk.is_last:
                chunk.request.decodes_in_flight -= 1
        for request in plan.requests:
            request.steps_in_flight -= 1
            if request.phase is not Phase.ENDED:
                request.tokens.extend(new_tokens.get(request, ()))
                if request.phase is Phase.DECODE:
                    # The newest token is not in the cache yet. With an MTP layer, neither are its
                    # entries of the newest decode step.
                    lag = 1 + self.pages.lookahead * (1 + request.drafts)
                    self._publish(request, len(request.tokens) - lag)
                if request in finished:
                    self.end(request)
        self._retire()

    def end(self, request: ScheduledRequest) -> None:
        """Ends a request now. Its slot and pages are free once its steps in flight are reported."""
        if request.phase is Phase.WAITING and request in self.waiting:
            self.waiting.remove(request)
        elif request.is_running:
            self.running.remove(request)
            self._retiring.append(request)
        request.phase = Phase.ENDED
        self._retire()

    def check_integrity(self) -> None:
        """Raises AssertionError if a slot or page is lost or owned twice, or a queue contradicts a
        request's state."""
        owners = [*self.running, *self._retiring]
        self.pages.check_integrity([request.pages for request in owners])
        slots = [_slot(request) for request in owners] + self._free_slots
        assert sorted(slots) == list(range(self.config.max_running)), "a slot is lost or used twice"
        assert all(r.phase is Phase.WAITING and not r.pages for r in self.waiting)
        assert all(request.is_running for request in self.running)
        assert all(not request.is_running for request in self._retiring)
        assert all(request.steps_in_flight > 0 for request in self._retiring)
        for queue in (self.waiting, self.running):
            orders = [self._order(request) for request in queue]
            assert orders == sorted(orders), "a queue is out of order"
        for request in self.running:
            room = len(request.pages) * self.pages.page_size
            assert request.computed <= room, "a request has written past its pages"
            most = self._pages_for(request.max_length + request.drafts)
            assert len(request.pages) <= most, "a request has pages that it cannot fill"

    def _order(self, request: ScheduledRequest) -> float:
        return request.arrival + request.priority * self.config.priority_seconds

    def _pages_for(self, tokens: int) -> int:
        return self.pages.pages_for(tokens)

    def _end_overdue(self, now: float) -> list[tuple[ScheduledRequest, EndReason]]:
        ended: list[tuple[ScheduledRequest, EndReason]] = []
        preempted = [r for r in self._retiring if r.phase is Phase.WAITING]
        for request in [*self.waiting, *self.running, *preempted]:
            if request.is_cancelled:
                ended.append((request, "cancelled"))
            elif now >= request.deadline:
                ended.append((request, "timeout"))
        for request, _ in ended:
            self.end(request)
        return ended

    def _plan_decodes(self) -> list[ScheduledRequest]:
        """Returns the requests that decode in the next step, each with pages for it."""
        planned: list[ScheduledRequest] = []
        for request in list(self.running):
            # A request that reaches its limit with the steps in flight needs no other.
            is_done = request.least_length >= request.max_length
            if request.phase is not Phase.DECODE or is_done:
                continue
            if self._grow(request, request.greatest_length + request.drafts):
                planned.append(request)
        return planned

    def _grow(self, request: ScheduledRequest, tokens: int) -> bool:
        """Gives a request pages for ``tokens`` tokens and returns whether it has them.

        If pages are missing, it preempts the last running request, which may be this one. It never
        preempts another while pages of retiring requests are still to come: they may be enough.
        """
        missing = self._pages_for(tokens) - len(request.pages)
        if missing <= 0:
            return True
        while (pages := self.pages.allocate(missing)) is None:
            if self._retiring:
                return False
            last = self.running[-1]
            assert last is not request or len(self.running) > 1, "add() refuses such requests"
            self._preempt(last)
            if last is request:
                return False
        request.pages += pages
        return True

    def _preempt(self, request: ScheduledRequest) -> None:
        """Moves a running request back to the waiting queue. It is prefilled again, generated
        tokens included, unless the prefix cache still has them."""
        self.running.remove(request)
        request.phase = Phase.WAITING
        request.preemptions += 1
        self.preemptions += 1
        self._retiring.append(request)
        self._retire()

    def _retire(self) -> None:
        """Frees the slots and pages of retiring requests without steps in flight."""
        for request in [r for r in self._retiring if not r.steps_in_flight]:
            self._retiring.remove(request)
            self.pages.release(request.pages)
            self._free_slots.append(_slot(request))
            request.pages, request.slot = [], None
            request.computed = request.published = 0
            if request.phase is Phase.WAITING:
                bisect.insort(self.waiting, request, key=self._order)

    def _plan_prefills(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for request in self.running:
            if request.phase is Phase.PREFILL:
                chunks += self._chunks(request, self.config.max_chunks - len(chunks))
        return chunks

    def _chunks(self, request: ScheduledRequest, most: int) -> list[Chunk]:
        """Plans up to ``most`` chunks of a request."""
        chunks = []
        end = len(request.tokens)
        while len(chunks) < most and request.computed < end:
            count = min(self.config.chunk_tokens, end - request.computed)
            is_last = request.computed + count == end
            is_first = not request.is_slot_ready
            start = request.computed
            chunks.append(Chunk(request, _slot(request), start, count, is_first, is_last))
            request.is_slot_ready = True
            request.computed += count
            if is_last:
                request.phase = Phase.DECODE
        # The device runs steps in order, so a later step can already read these pages.
        self._publish(request, request.computed)
        return chunks

    def _publish(self, request: ScheduledRequest, written: int) -> None:
        """Indexes the full pages within the first ``written`` tokens of a request."""
        known = request.tokens[: max(written, 0) + self.pages.lookahead]
        request.published = self.pages.publish(known, request.pages, request.published)

    def _admit(self, most_chunks: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        while self.waiting and self._free_slots and len(chunks) < most_chunks:
            request = self.waiting[0]
            hit = self.pages.cached_prefix(request.tokens)
            self.pages.reuse(hit)
            needed = self._pages_for(len(request.tokens) + 1 + request.drafts) - len(hit)
            # Pages that running requests will soon need are left to them.
            reserve = len(self.running)
            pages = self.pages.allocate(needed) if self._has_room(needed, reserve) else None
            if pages is None:
                self.pages.release(hit)
                break
            self.waiting.pop(0)
            request.pages = [*hit, *pages]
            request.slot = self._free_slots.pop()
            request.phase = Phase.PREFILL
            request.is_slot_ready = False
            request.computed = len(hit) * self.pages.page_size
            request.published = len(hit)
            if not request.preemptions:
                request.cached_tokens = request.computed
                self.prefix_hit_tokens += request.computed
                self.prefix_queried_tokens += len(request.tokens)
            bisect.insort(self.running, request, key=self._order)
            chunks += self._chunks(request, most_chunks - len(chunks))
        return chunks

    def _has_room(self, needed: int, reserve: int) -> bool:
        """Whether a request may be admitted. The reserve is waived if nothing else runs."""
        return self.pages.available >= needed + (reserve if self.running else 0)

    def _decode_steps(self, decodes: Sequence[ScheduledRequest], most: int) -> int:
        """Returns how many decode steps a dispatch can take, and gives each request its pages."""
        longest = max(r.max_length - r.least_length for r in decodes)
        steps = max(1, min(most, longest))
        while steps > 1:
            needs = [self._missing_for(request, steps) for request in decodes]
            pages = self.pages.allocate(sum(needs))
            if pages is not None:
                for request, count in zip(decodes, needs, strict=True):
                    request.pages += [pages.pop() for _ in range(count)]
                return steps
            steps //= 2
        return 1

    def _missing_for(self, request: ScheduledRequest, steps: int) -> int:
        most = request.greatest_length + steps * (1 + request.drafts) + request.drafts
        most = min(most, request.max_length + request.drafts)
        return max(self._pages_for(most) - len(request.pages), 0)


def _slot(request: ScheduledRequest) -> int:
    assert request.slot is not None, "the request has no slot"
    return request.slot
