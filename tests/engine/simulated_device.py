"""A device that runs step plans without arrays, and checks that attention reads the right entries.

It stores, for every entry of every page, the whole prefix of tokens that the entry was computed
from. When it computes a position, it looks up all earlier positions through the request's pages and
compares them with the request's own tokens. The next token is a function of the prefix, so that a
wrong entry would also show as a wrong token.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections import deque
from collections.abc import Iterable
from typing import Any

from dsv3_jax.engine.scheduling.page_allocator import PageAllocator
from dsv3_jax.engine.scheduling.scheduler import Scheduler
from dsv3_jax.engine.scheduling.step_plan import (
    PageSave,
    ScheduledRequest,
    SchedulerConfig,
    ShardPlan,
    StepPlan,
)
from dsv3_jax.engine.scheduling.stored_pages import SwapSpace
from tests.engine.simulated_store import LOAD_SECONDS, SimulatedStore

Page = list[list[Any]]
"""Entries of a page, of each array."""

VOCABULARY = 7
FIRST_PAGE = 10  # of the first shard


def shard_pages(
    shards: int, num_pages: int, page_size: int, *, lookahead: int, prefix_cache: bool
) -> list[PageAllocator]:
    """Returns one allocator per shard. The pages of a shard follow those of the one before it."""
    return [
        PageAllocator(
            num_pages,
            page_size,
            lookahead=lookahead,
            prefix_cache=prefix_cache,
            first_page=FIRST_PAGE + shard * num_pages,
        )
        for shard in range(shards)
    ]


def next_token(prefix: tuple[int, ...]) -> int:
    """The token that the simulated model predicts after a prefix."""
    return zlib.crc32(repr(prefix).encode()) % VOCABULARY


def completion(prompt: list[int], max_length: int, stop: int | None = None) -> list[int]:
    """The tokens that a request gains when it runs alone."""
    tokens = list(prompt)
    while len(tokens) < max_length:
        tokens.append(next_token(tuple(tokens)))
        if tokens[-1] == stop:
            break
    return tokens[len(prompt) :]


@dataclasses.dataclass
class Slot:
    """A row of the device's state."""

    request: ScheduledRequest
    tokens: list[int]
    prompt_length: int = 0
    is_finished: bool = False


class SimulatedDevice:
    """Runs plans in order. A request ends with the token ``stop``, and without a token if its
    prompt begins with ``broken``."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        stop: int | None = None,
        lookahead: int = 0,
        aligned_chunks: int | None = None,
        broken: int | None = None,
    ):
        self.aligned_chunks = aligned_chunks
        self.num_pages = num_pages  # of one shard
        self.page_size = page_size
        self.broken = broken
        self.stop = stop
        self.lookahead = lookahead
        self.entries: dict[tuple[int, int], tuple[int, ...]] = {}
        self.mtp_entries: dict[tuple[int, int], tuple[int, ...]] = {}
        # Begin of the chunk that an entry was computed in; -1 if a decode step computed it.
        self.origins: dict[tuple[int, int], int] = {}
        self.saved: dict[ScheduledRequest, tuple[Slot, list[Page]]] = {}
        self.slots: dict[tuple[int, int], Slot] = {}  # by shard and number
        self.tokens_computed = 0
        self.store: SimulatedStore | None = None

    def save(self, saves: Iterable[PageSave]) -> None:
        """Copies pages to the store."""
        for save in saves:
            assert self.store is not None
            (address,) = save.addresses
            self.store.save(address, save.identity, self._read(save.page))

    def run(self, plan: StepPlan) -> tuple[dict, set]:
        """Returns the tokens that each request gained, step by step, and the requests that are
        finished."""
        gained: dict[ScheduledRequest, list[list[int]]] = {}
        finished: set[ScheduledRequest] = set()
        self.save(plan.saves)
        for load in plan.loads:
            self._write(load.page, *load.contents)
        for number, shard in enumerate(plan.shards):
            self._run_shard(number, shard, plan.decode_steps, gained, finished)
        return gained, finished

    def _run_shard(
        self, number: int, plan: ShardPlan, decode_steps: int, gained: dict, finished: set
    ) -> None:
        for out in plan.swap_outs:
            row = self.slots[number, out.slot]
            self.saved[out.request] = (row, [self._read(page) for page in out.pages])
        for back in plan.swap_ins:
            self.slots[number, back.slot], pages = self.saved.pop(back.request)
            for page, contents in list(zip(back.pages, pages, strict=True))[back.shared :]:
                self._write(page, contents)
        for slot, request, drafts in zip(plan.slots, plan.decodes, plan.drafts, strict=True):
            assert drafts <= request.drafts
            row = self.slots[number, slot]
            self._check_owner(number, row, request)
            for _ in range(decode_steps):
                if not row.is_finished:
                    self._decode(row, request, drafts, gained)
            if row.is_finished:
                finished.add(request)
        for chunk in plan.chunks:
            request = chunk.request
            if chunk.is_first:
                tokens = list(request.tokens)
                self.slots[number, chunk.slot] = Slot(request, tokens, len(tokens))
            row = self.slots[number, chunk.slot]
            self._check_owner(number, row, request)
            for position in range(chunk.start, chunk.start + chunk.count):
                self._compute(row, request.pages, position, chunk.start)
                if position + 1 < len(row.tokens):
                    self._compute_mtp(row, request.pages, position)
            assert chunk.is_last == (chunk.start + chunk.count == len(row.tokens))
            if chunk.is_last:
                gained.setdefault(request, []).append([])
                self._append(row, request, next_token(tuple(row.tokens)), gained)
                if row.is_finished:
                    finished.add(request)

    def _check_owner(self, shard: int, row: Slot, request: ScheduledRequest) -> None:
        assert row.request is request, "a slot belongs to another request"
        owners = {(page - FIRST_PAGE) // self.num_pages for page in request.pages}
        assert owners == {shard}, "a request has pages of another shard"

    def _decode(self, row: Slot, request: ScheduledRequest, drafts: int, gained: dict) -> None:
        """Verifies drafts. The number of accepted ones depends on the prefix."""
        prefix = tuple(row.tokens)
        last = len(prefix) - 1
        for position in range(max(last - 1 - request.drafts, 0), last):
            self._compute_mtp(row, request.pages, position)
        accepted = zlib.crc32(repr((prefix, "accepted")).encode()) % (drafts + 1)
        if request.depth:
            request.depth.observe(drafts, accepted)
        # Rejected drafts are written too, after the accepted ones.
        self._compute(row, request.pages, last)
        for k in range(drafts):
            position = last + 1 + k
            key = (request.pages[position // self.page_size], position % self.page_size)
            self.entries[key] = (*prefix, *[-1] * (k + 1))
        gained.setdefault(request, []).append([])
        for _ in range(accepted + 1):
            if row.is_finished:
                break
            self._compute(row, request.pages, len(row.tokens) - 1)
            self._append(row, request, next_token(tuple(row.tokens)), gained)

    def _append(self, row: Slot, request: ScheduledRequest, token: int, gained: dict) -> None:
        if row.tokens[0] == self.broken:
            row.is_finished = True
            return
        row.tokens.append(token)
        gained[request][-1].append(token)
        row.is_finished = token == self.stop or len(row.tokens) >= request.max_length

    @property
    def _arrays(self) -> tuple[dict[tuple[int, int], Any], ...]:
        return self.entries, self.mtp_entries, self.origins

    def _read(self, page: int) -> Page:
        """Returns the entries of a page."""
        keys = [(page, offset) for offset in range(self.page_size)]
        return [[array.get(key) for key in keys] for array in self._arrays]

    def _write(self, page: int, contents: Page) -> None:
        """Replaces the entries of a page."""
        for array, entries in zip(self._arrays, contents, strict=True):
            for offset, entry in enumerate(entries):
                array.pop((page, offset), None)
                if entry is not None:
                    array[page, offset] = entry

    def _compute(self, row: Slot, pages: list[int], position: int, chunk_start: int = -1) -> None:
        tokens = tuple(row.tokens)
        for earlier in range(position):
            key = (pages[earlier // self.page_size], earlier % self.page_size)
            assert self.entries[key] == tokens[: earlier + 1], "attention reads a wrong entry"
            if self.aligned_chunks:
                start = earlier // self.aligned_chunks * self.aligned_chunks
                expected = start if earlier < row.prompt_length else -1
                assert self.origins[key] == expected, "an entry was not computed as it is alone"
        key = (pages[position // self.page_size], position % self.page_size)
        self.entries[key] = tokens[: position + 1]
        self.origins[key] = chunk_start
        self.tokens_computed += 1

    def _compute_mtp(self, row: Slot, pages: list[int], position: int) -> None:
        """The MTP layer's entry of a position, which also depends on the next token."""
        if not self.lookahead:
            return
        tokens = tuple(row.tokens)
        for earlier in range(position):
            key = (pages[earlier // self.page_size], earlier % self.page_size)
            assert self.mtp_entries[key] == tokens[: earlier + 2], "MTP reads a wrong entry"
        key = (pages[position // self.page_size], position % self.page_size)
        self.mtp_entries[key] = tokens[: position + 2]


class Simulation:
    """A scheduler and a simulated device, with results that are reported ``delay`` steps late.

    ``num_pages`` and the limits in ``config`` are those of one shard. ``load_bytes`` limits the
    loads from the store, whose pages have ``SimulatedStore.page_bytes``.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int = 4,
        delay: int = 1,
        lookahead: int = 0,
        prefix_cache: bool = True,
        stop: int | None = None,
        max_decode_steps: int = 1,
        shards: int = 1,
        swap_pages: int | None = None,
        aligned_prefixes: bool = False,
        has_store: bool = False,
        load_bytes: float = math.inf,
        broken: int | None = None,
        **config: int,
    ):
        settings = {"max_running": 4, "chunk_tokens": 5, "max_chunks": 3} | config
        pages = shard_pages(
            shards, num_pages, page_size, lookahead=lookahead, prefix_cache=prefix_cache
        )
        swaps = None if swap_pages is None else [SwapSpace(swap_pages) for _ in pages]
        limits = SchedulerConfig(**settings, aligned_prefixes=aligned_prefixes)
        self.now = 0.0
        self.store = SimulatedStore(page_size, lookahead, lambda: self.now)
        store = self.store if has_store else None
        self.scheduler = Scheduler(
            limits, pages, swaps, store=store, load_seconds=LOAD_SECONDS, load_bytes=load_bytes
        )
        aligned = settings["chunk_tokens"] if aligned_prefixes else None
        self.device = SimulatedDevice(num_pages, page_size, stop, lookahead, aligned, broken)
        self.device.store = self.store
        self.delay = delay
        self.max_decode_steps = max_decode_steps
        self.unread: deque[tuple[StepPlan, dict, set]] = deque()
        self.ended: dict[ScheduledRequest, str] = {}
        self.plans: list[StepPlan] = []

    def step(self) -> bool:
        """One turn of an engine's loop. Returns False if there was nothing to do."""
        plan, ended = self.scheduler.schedule(self.now, max_decode_steps=self.max_decode_steps)
        self.ended |= dict(ended)
        for request, _ in ended:
            self.device.saved.pop(request, None)
        if plan is not None:
            self.plans.append(plan)
            self.unread.append((plan, *self.device.run(plan)))
        else:
            self.device.save(self.scheduler.take_saves())
        self.scheduler.check_integrity()
        while self.unread and (plan is None or len(self.unread) > self.delay):
            self.read()
        self.now += 1.0
        return plan is not None or bool(ended)

    def read(self) -> None:
        """Reports the oldest unread results."""
        plan, gained, finished = self.unread.popleft()
        self.ended |= dict.fromkeys(
            (r for r in finished if r not in self.ended and r.phase.value != "ended"), "finished"
        )
        tokens = {request: list(itertools.chain(*steps)) for request, steps in gained.items()}
        broken = {r for r in finished if r.tokens[0] == self.device.broken}
        self.scheduler.report(plan, tokens, finished, broken)
        self.scheduler.check_integrity()

    def run(self, most: int = 10_000) -> None:
        """Steps until nothing is left."""
        for _ in range(most):
            if not self.step() and self.scheduler.is_idle:
                break
        assert self.scheduler.is_idle, "requests are left"
        used = [shard.pages.used for shard in self.scheduler.shards]
        assert not any(used), "an idle engine holds pages"
        swapped = [shard.swap.used for shard in self.scheduler.shards]
        assert not any(swapped), "an idle engine holds host memory"
        assert not self.device.saved, "host memory is lost"
        assert all(load.is_closed for load in self.store.loads), "a load is lost"
