"""Prompts whose pages come from a store: in simulated time, on the simulated device."""

from __future__ import annotations

import math
import weakref
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import rule

from dsv3_jax.engine import CacheTiers, Engine
from dsv3_jax.engine.scheduling.page_allocator import PageAllocator
from dsv3_jax.engine.scheduling.scheduler import Scheduler
from dsv3_jax.engine.scheduling.step_plan import ScheduledRequest, SchedulerConfig
from tests.engine.simulated_device import Simulation, completion
from tests.engine.simulated_store import LOAD_SECONDS, SimulatedStore
from tests.engine.test_scheduler import RandomOperations, request

PROMPT = [i % 7 for i in range(20)]  # five pages; one token of the last stays uncovered


def make(delays=(2.0,), lost=(0,), lookahead=0, **options) -> Simulation:
    """Returns a simulation whose store has the pages of the prompt, and whose cache has none."""
    simulation = Simulation(num_pages=24, has_store=True, lookahead=lookahead, **options)
    filler = request([*PROMPT, 1], 4)
    simulation.scheduler.add(filler)
    simulation.run()
    simulation.store.begin(delays, lost)
    simulation.scheduler.clear_prefix_cache()
    simulation.plans.clear()
    return simulation


def check(*requests: ScheduledRequest) -> None:
    for each in requests:
        prompt = each.tokens[: each.max_length - 6]
        assert each.tokens[len(prompt) :] == completion(prompt, each.max_length)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_prompt_is_loaded_except_its_last_token(lookahead):
    simulation = make(lookahead=lookahead)
    one = request(PROMPT, 6, arrival=simulation.now)
    simulation.scheduler.add(one)
    assert simulation.scheduler.loads.loading(simulation.now) == 1
    simulation.run()
    check(one)
    assert one.cached_tokens == simulation.scheduler.loaded_tokens == 16
    assert sum(chunk.count for plan in simulation.plans for chunk in plan.chunks) == 4
    # It was published like any other: the next one needs no store.
    again = request(PROMPT, 6, arrival=simulation.now)
    simulation.scheduler.add(again)
    assert not simulation.scheduler.loads.loading(simulation.now)
    simulation.run()
    assert again.cached_tokens == 16
    assert simulation.scheduler.loaded_tokens == 16


def test_others_go_on_meanwhile():
    simulation = make(delays=(3.0,))
    first = request(PROMPT, 6, arrival=simulation.now)
    second = request([3, 3, 3], 6, arrival=simulation.now)
    simulation.scheduler.add(first, second)
    simulation.step()
    assert second.is_running
    assert not first.is_running
    simulation.run()
    check(first, second)
    assert first.cached_tokens == 16


def test_after_the_deadline_the_prompt_is_computed():
    simulation = make(delays=(1e9,))
    one = request(PROMPT, 6, arrival=simulation.now)
    began = simulation.now
    simulation.scheduler.add(one)
    for _ in range(100):
        if simulation.step():
            break
    assert simulation.now == began + LOAD_SECONDS + 1
    simulation.run()
    check(one)
    assert one.cached_tokens == 0
    assert simulation.store.loads[0].is_closed


@pytest.mark.parametrize(("lost", "cached"), [(1, 12), (4, 0), (99, 0)])
def test_missing_pages_are_computed(lost, cached):
    simulation = make(lost=(lost,))
    one = request(PROMPT, 6, arrival=simulation.now)
    simulation.scheduler.add(one)
    simulation.run()
    check(one)
    assert one.cached_tokens == cached


def test_requests_that_begin_alike_share_a_load():
    simulation = make()
    requests = [request([*PROMPT, i, i], 6, arrival=simulation.now) for i in range(3)]
    simulation.scheduler.add(*requests)
    simulation.scheduler.cancel(requests[0])
    simulation.run()
    assert len(simulation.store.loads) == 1
    check(*requests[1:])
    assert [each.cached_tokens for each in requests] == [0, 20, 20]
    assert simulation.scheduler.loaded_tokens == 20, "the second one hits the cache"


def test_only_what_the_cache_lacks_is_loaded():
    simulation = make()
    beginning = request(PROMPT[:9], 6, arrival=simulation.now)
    simulation.scheduler.add(beginning)
    simulation.run()
    loaded = simulation.scheduler.loaded_tokens
    one = request(PROMPT, 6, arrival=simulation.now)
    simulation.scheduler.add(one)
    assert len(simulation.store.loads[-1]._contents) == 2
    simulation.run()
    check(one)
    assert one.cached_tokens == 16
    assert simulation.scheduler.loaded_tokens - loaded == 8


def test_pages_after_an_evicted_beginning_are_of_no_use():
    simulation = make(delays=(0.0, 2.0))
    simulation.scheduler.add(request(PROMPT[:9], 6, arrival=simulation.now))
    simulation.run()
    one = request(PROMPT, 6, arrival=simulation.now)
    simulation.scheduler.add(one)
    for shard in simulation.scheduler.shards:
        shard.pages.clear()  # as other requests would evict them
    simulation.run()
    check(one)
    assert simulation.store.loads[-1].is_closed
    assert one.cached_tokens == 0


def test_another_model_uses_no_page_of_the_one_before():
    simulation = make()
    waiting = request(PROMPT, 6, arrival=simulation.now)
    simulation.scheduler.add(waiting)
    simulation.store.identity = 1
    simulation.scheduler.clear_prefix_cache()
    assert simulation.store.loads[0].is_closed
    simulation.run()
    assert waiting.cached_tokens == 0
    later = request([*PROMPT, 2], 6, arrival=simulation.now)
    simulation.scheduler.clear_prefix_cache()
    simulation.scheduler.add(later)
    simulation.run()
    assert later.cached_tokens == 20, "the new model's pages were saved under its own identity"
    assert {identity for identity, _ in simulation.store.pages} == {0, 1}


@pytest.mark.parametrize("method", ["addresses", "lookup", "load"])
def test_a_store_that_raises_adds_nothing(method, monkeypatch):
    """It refuses all of the requests that are added together, and leaves nothing of any."""
    simulation = make()
    scheduler, store = simulation.scheduler, simulation.store
    waiting = request([1, *PROMPT], 6, arrival=simulation.now)
    scheduler.add(waiting)
    used = [shard.pages.used for shard in scheduler.shards]
    works = getattr(store, method)
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError("no route to host")
        return works(*arguments)

    monkeypatch.setattr(store, method, fail)
    deadline = simulation.now + 3
    # The second one's pages are others than the first one's, so that it has a load of its own.
    both = [request(PROMPT[:n], 6, arrival=simulation.now, deadline=deadline) for n in (20, 12)]
    for _ in range(2):
        calls.clear()
        with pytest.raises(OSError, match="no route"):
            scheduler.add(*both)
        assert scheduler.waiting == [waiting]
        assert all(load.is_closed for load in store.loads), "a load is lost"
        assert not scheduler.loads.loading(simulation.now)
        assert [shard.pages.used for shard in scheduler.shards] == used
        assert scheduler._next_deadline == math.inf
        scheduler.check_integrity()
    monkeypatch.undo()
    for each in both:
        each.deadline = math.inf
    scheduler.add(*both)
    simulation.run()
    check(waiting, *both)
    scheduler.check_idle()


def test_integrity_notices_an_evicted_page_and_a_lost_load():
    simulation = make()
    one = request(PROMPT, 6, arrival=simulation.now)
    simulation.scheduler.add(one)
    simulation.scheduler.waiting.remove(one)
    with pytest.raises(AssertionError, match="does not wait"):
        simulation.scheduler.check_integrity()
    simulation = make()
    simulation.scheduler.add(request([5] * 9, 6))
    simulation.step()
    simulation.scheduler.schedule(simulation.now)
    simulation.read()
    simulation.scheduler.shards[0].pages.clear()
    with pytest.raises(AssertionError, match="evicted"):
        simulation.scheduler.check_integrity()


class TestPreempted:
    """The second of two requests is preempted when both have 16 pages together. It comes back when
    the first one, which needs 15, has ended."""

    def begin(self, delays=(2.0,), lost=(0,), num_pages=16, **options) -> None:
        self.simulation = Simulation(
            num_pages=num_pages, max_running=2, has_store=True, **({"lookahead": 1} | options)
        )
        self.simulation.store.begin(delays, lost)
        self.first = request(PROMPT, 40, arrival=0.0)
        self.second = request([i * 3 % 7 for i in range(12)], 30, arrival=1.0)
        self.simulation.scheduler.add(self.first, self.second)

    def run(self) -> tuple[int, int]:
        """Returns how many tokens were loaded when the second request came back, and computed."""
        self.simulation.run()
        for each, length in ((self.first, 20), (self.second, 12)):
            assert each.tokens[length:] == completion(each.tokens[:length], each.max_length)
        assert (self.first.preemptions, self.second.preemptions) == (0, 1)
        assert self.simulation.scheduler.loaded_tokens == 0
        chunks = [c for p in self.simulation.plans for c in p.chunks if c.request is self.second]
        return self.simulation.scheduler.reloaded_tokens, sum(c.count for c in chunks) - 12

    def evict(self, begin: int) -> None:
        """Takes the second request's pages from the cache, from number ``begin`` on."""
        (shard,) = self.simulation.scheduler.shards
        for page in reversed(shard.pages.cached_prefix(self.second.tokens)[begin:]):
            shard.pages._cached.move_to_end(page, last=False)
            shard.pages._free.append(shard.pages._evict())

    @pytest.mark.parametrize("options", [{}, {"lookahead": 0}, {"delay": 2, "max_decode_steps": 3}])
    def test_its_pages_are_loaded_with_generated_tokens(self, options):
        self.begin(**options)
        loaded, computed = self.run()
        assert loaded > 12, "no generated token was loaded"
        assert 0 < computed <= 4 + 1, "more than the last page and its lookahead was computed"

    def test_with_drafts_on_shards(self):
        self.begin(shards=2)
        others = [request([n, *PROMPT], 39, arrival=n / 4) for n in (1, 5)]
        self.simulation.scheduler.add(*others)
        for each in (self.first, self.second, *others):
            each.drafts = 2
        prompts = {r: list(r.tokens) for r in (self.first, self.second, *others)}
        self.simulation.run()
        for each, prompt in prompts.items():
            assert each.tokens[len(prompt) :] == completion(prompt, each.max_length)
        assert self.simulation.scheduler.reloaded_tokens > 0

    @pytest.mark.parametrize(
        ("delay", "lost", "missing"), [(2.0, 1, 4), (2.0, 99, 99), (1e9, 0, 99)]
    )
    def test_what_does_not_come_is_computed(self, delay, lost, missing):
        self.begin()
        most, least = self.run()
        self.begin(delays=(delay,), lost=(lost,))
        loaded, computed = self.run()
        assert loaded == max(most - missing, 0)
        assert loaded + computed == most + least

    def preempt(self) -> None:
        """Preempts the second request, which lacks nothing."""
        self.begin(delays=(3.0,), num_pages=40, delay=0)
        while len(self.second.tokens) < 26:
            self.simulation.step()
        self.simulation.device.save(self.simulation.scheduler.take_saves())
        self.simulation.scheduler.shards[0].preempt(self.second)

    def test_nothing_is_loaded_that_the_cache_has(self):
        self.preempt()
        assert self.run() == (0, 2)
        assert not self.simulation.store.loads

    def test_what_the_cache_has_lost_is_loaded(self):
        self.preempt()
        self.evict(4)
        assert self.run() == (8, 2)
        assert [len(load._contents) for load in self.simulation.store.loads] == [2]

    def test_what_the_cache_loses_during_a_load_is_loaded_after_it(self):
        self.preempt()
        self.evict(4)
        self.simulation.step()
        self.evict(1)
        assert self.run() == (20, 2)
        assert [len(load._contents) for load in self.simulation.store.loads] == [2, 5]

    def test_of_another_model_nothing_is_loaded(self):
        self.preempt()
        self.evict(4)
        self.simulation.step()
        assert self.simulation.scheduler.loads.loading(self.simulation.now) == 1
        self.simulation.store.identity += 1
        self.simulation.scheduler.clear_prefix_cache()
        assert self.run() == (0, 26)

    def test_cancelled_during_the_load_it_leaves_nothing(self):
        self.preempt()
        self.evict(4)
        self.simulation.step()
        self.simulation.scheduler.cancel(self.second)
        self.simulation.run()
        assert self.simulation.store.loads[0].is_closed
        assert self.simulation.ended[self.second] == "cancelled"


class _Page:
    """Contents of a page, in whose place a test counts the objects that are left."""


class CountingStore:
    """A store that has all pages of all prompts. Its loads come after some looks at them."""

    parts = 1
    page_bytes = 1000
    identity = 0

    def __init__(self, page_size: int, looks: int):
        self.alive: weakref.WeakSet[_Page] = weakref.WeakSet()
        self.begun: list[int] = []
        self._page_size, self._looks = page_size, looks

    @property
    def num_bytes(self) -> int:
        return len(self.alive) * self.page_bytes

    def addresses(self, tokens, known=()):
        return [(tokens[0], number) for number in range(len(tokens) // self._page_size)]

    def lookup(self, addresses) -> int:
        return len(addresses)

    def load(self, addresses) -> CountingLoad:
        self.begun.append(addresses[0][0])
        pages = [_Page() for _ in addresses]
        self.alive.update(pages)
        return CountingLoad(pages, self._looks)


class CountingLoad:
    def __init__(self, pages: list[_Page], looks: int):
        self._pages, self._looks = pages, looks

    @property
    def contents(self) -> list[_Page] | None:
        self._looks -= 1
        return self._pages if self._looks < 0 else None

    def close(self) -> None:
        self._pages = []


class TestBudget:
    """Loads stay below a number of bytes, however many requests wait."""

    PROMPT = 2**15
    PAGE = 64

    def scheduler(self, budget: int, *, looks: int = 3, slots: int = 4, most: int = 2) -> Scheduler:
        self.store = CountingStore(self.PAGE, looks)
        pages = PageAllocator(slots * (self.PROMPT // self.PAGE + 1), self.PAGE)
        config = SchedulerConfig(max_running=slots, chunk_tokens=64, max_chunks=most)
        return Scheduler(config, [pages], store=self.store, load_seconds=1e6, load_bytes=budget)

    def run(self, scheduler: Scheduler, budget: int, most: int = 100_000) -> list[int]:
        """Runs until nothing is left, each request until its first token. Returns the first tokens
        of the prompts in the order of their ends."""
        ended, unread, largest = [], [], 0
        for now in range(most):
            plan, _ = scheduler.schedule(float(now))
            if plan is not None:
                unread.append(plan)
            scheduler.check_integrity()
            assert self.store.num_bytes <= scheduler.loads.num_bytes <= budget
            largest = max(largest, self.store.num_bytes)
            if unread and (plan is None or len(unread) > 1):  # results are one step late
                plan = unread.pop(0)
                done = [chunk.request for chunk in plan.chunks if chunk.is_last]
                ended += [request.tokens[0] for request in done]
                scheduler.report(plan, {request: [0] for request in done}, set(done))
                del plan, done
            if scheduler.is_idle:
                break
        scheduler.check_idle()
        assert scheduler.loads.num_bytes == self.store.num_bytes == 0
        self.largest = largest
        return ended

    def test_256_waiting_requests_with_32k_stored_tokens_each(self):
        pages = self.PROMPT // self.PAGE
        budget = 3 * pages * CountingStore.page_bytes + 7
        scheduler = self.scheduler(budget)
        requests = [request([n] * (self.PROMPT + 1), 2, arrival=n / 1000) for n in range(256)]
        scheduler.add(*requests)
        assert scheduler.loads.loading(0.0) == 256
        assert self.run(scheduler, budget) == list(range(256))
        assert self.store.begun == list(range(256)), "not in the order of the queue"
        assert scheduler.loaded_tokens == 256 * self.PROMPT, "a page that was stored is computed"
        assert self.largest > budget / 2

    def test_the_beginning_of_a_larger_prefix_is_loaded(self):
        budget = 5 * CountingStore.page_bytes + 1
        scheduler = self.scheduler(budget, most=64)
        requests = [request([n] * (20 * self.PAGE + 1), 2, arrival=n) for n in range(4)]
        scheduler.add(*requests)
        assert self.run(scheduler, budget) == [0, 1, 2, 3]
        assert [each.cached_tokens for each in requests] == [5 * self.PAGE] * 4

    def test_small_loads_do_not_overtake_a_large_one(self):
        """Else loads behind it could take the bytes that it waits for, again and again."""
        budget = 10 * CountingStore.page_bytes
        scheduler = self.scheduler(budget, slots=1)
        lengths = {0: 6, 1: 10, 2: 3, 3: 3}
        scheduler.add(
            *(request([n] * (k * self.PAGE + 1), 2, arrival=n) for n, k in lengths.items())
        )
        assert self.store.begun == [0]
        assert self.run(scheduler, budget) == self.store.begun == [0, 1, 2, 3]

    def test_who_comes_first_takes_the_bytes_of_others(self):
        budget = 10 * CountingStore.page_bytes
        scheduler = self.scheduler(budget, looks=10**9)
        later = [request([n] * (5 * self.PAGE + 1), 2, arrival=n) for n in (1, 2, 3)]
        scheduler.add(*later)
        assert self.store.begun == [1, 2]
        urgent = request([9] * (4 * self.PAGE + 1), 2, arrival=4, priority=-1)
        scheduler.add(urgent)
        assert self.store.begun == [1, 2, 9]
        assert scheduler.loads.num_bytes == self.store.num_bytes == 9 * CountingStore.page_bytes
        assert scheduler.loads.loading(5.0) == 4
        scheduler.check_integrity()
        scheduler.cancel(urgent)
        scheduler.schedule(5.0)
        assert self.store.begun == [1, 2, 9, 2]

    @pytest.mark.parametrize("reason", ["cancelled", "timeout", "end", "clear", "device"])
    def test_whatever_ends_a_request_gives_its_bytes_back(self, reason):
        budget = 10 * CountingStore.page_bytes
        scheduler = self.scheduler(budget, looks=10**9)
        first, second, third = (
            request([n] * (6 * self.PAGE + 1), 2, arrival=n, deadline=1e9) for n in range(3)
        )
        scheduler.add(first, second, third)
        assert (self.store.begun, scheduler.loads.num_bytes) == ([0], 6 * self.store.page_bytes)
        if reason == "cancelled":
            scheduler.cancel(first)
        elif reason == "timeout":
            first.deadline = scheduler._next_deadline = 1.0
        elif reason == "end":
            scheduler.end(first)
        elif reason == "clear":
            scheduler.clear_prefix_cache()
        else:
            scheduler.end_all()
        scheduler.schedule(2.0)
        scheduler.check_integrity()
        if reason in ("clear", "device"):
            assert scheduler.loads.num_bytes == self.store.num_bytes == 0
            return
        assert (self.store.begun, scheduler.loads.loading(2.0)) == ([0, 1], 2)
        scheduler.cancel(third)  # which waits for bytes
        scheduler.cancel(second)
        scheduler.schedule(3.0)
        assert scheduler.loads.num_bytes == self.store.num_bytes == 0
        scheduler.check_idle()

    def test_a_preempted_request_loads_within_them(self):
        """See :class:`TestPreempted`. What it lacks has seven pages."""
        whole = TestPreempted()
        whole.begin()
        most, _ = whole.run()
        part = TestPreempted()
        part.begin(load_bytes=3 * SimulatedStore.page_bytes)
        assert part.run()[0] == 12 < most

    def test_a_budget_below_a_page_is_refused(self, tiny_mtp):
        tiers = CacheTiers(host_bytes=2**20, load_bytes=100)
        with pytest.raises(ValueError, match=r"load_bytes: expected at least the \d+ bytes of a p"):
            Engine(tiny_mtp, None, 64, max_running=2, background=False, tiers=tiers)


class RandomLoads(RandomOperations):
    """The operations of the scheduler's tests, with a store and few prompts."""

    OPTIONS: ClassVar[dict] = {"has_store": True}

    @rule()
    def evict(self):
        """The cache alone loses its pages, so that later requests load them."""
        self.simulation.scheduler.clear_prefix_cache()

    @rule()
    def use(self):
        """Replaces the model. The simulated entries stay right, but their addresses do not."""
        self.simulation.store.identity += 1
        self.simulation.scheduler.clear_prefix_cache()


class RandomLoadsInTurn(RandomLoads):
    """With bytes for a few pages, so that most loads wait for others."""

    OPTIONS: ClassVar[dict] = {"has_store": True, "load_bytes": 4 * SimulatedStore.page_bytes}


TestRandomLoadsInTurn = RandomLoadsInTurn.TestCase
TestRandomLoadsInTurn.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)

TestRandomLoads = RandomLoads.TestCase
TestRandomLoads.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_pages_are_saved_when_logits_are_known_to_be_finite(lookahead, delay):
    """Only then, and not those of requests whose logits are not, or that end before any are known.
    The chunks before the last one count here as unknown."""
    simulation = Simulation(
        num_pages=40, has_store=True, lookahead=lookahead, delay=delay, broken=9, max_chunks=1
    )
    store, pages = simulation.store, simulation.scheduler.shards[0].pages
    long, short = [9, *PROMPT, *PROMPT], [9, *PROMPT]
    simulation.scheduler.add(request(long, 6), request(long, 6), request(short, 6))
    for _ in range(200):
        simulation.step()
        saved = {tokens[0] for _, tokens in store.pages}
        assert 9 not in saved
        if simulation.scheduler.is_idle:
            break
    assert not any(pages.cached_prefix([*prompt, 0]) for prompt in (long, short))
    cancelled = request([8, *PROMPT, *PROMPT], 6, arrival=simulation.now)
    simulation.scheduler.add(cancelled)
    simulation.step()
    simulation.scheduler.cancel(cancelled)
    simulation.run()
    fine = request([7, *PROMPT], 6, arrival=simulation.now)
    simulation.scheduler.add(fine)
    simulation.run()
    simulation.step()
    known = len(fine.tokens) - 1 - lookahead
    addresses = store.addresses(fine.tokens[: known + lookahead])
    assert store.lookup(addresses) == len(addresses) >= len(PROMPT) // 4
