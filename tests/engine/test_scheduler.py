"""The scheduler on a simulated device: every request gains the tokens that it gains alone."""

from __future__ import annotations

from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsv3_jax.engine.scheduling.page_allocator import PageAllocator
from dsv3_jax.engine.scheduling.scheduler import QueueFullError, Scheduler
from dsv3_jax.engine.scheduling.step_plan import Phase, ScheduledRequest, SchedulerConfig
from dsv3_jax.generation.depth import DraftDepth
from tests.engine.simulated_device import VOCABULARY, Simulation, completion

STOP = 3


def request(prompt: list[int], new: int = 6, **fields) -> ScheduledRequest:
    return ScheduledRequest(list(prompt), len(prompt) + new, **fields)


def prompts(count: int, length: int, shared: int = 0) -> list[list[int]]:
    """Prompts that share their first tokens and differ after them."""
    return [
        [7] * shared + [(i * 5 + j) % VOCABULARY for j in range(length - shared)]
        for i in range(count)
    ]


class TestEveryRequestIsServed:
    @given(
        lengths=st.lists(
            st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 30)), min_size=1
        ),
        num_pages=st.integers(18, 40),
        delay=st.integers(0, 3),
        drafts=st.integers(0, 3),
        lookahead=st.booleans(),
        prefix_cache=st.booleans(),
        max_decode_steps=st.integers(1, 5),
        chunk_tokens=st.integers(1, 20),
        shards=st.integers(1, 3),
    )
    @settings(max_examples=150, deadline=None)
    def test_with_the_tokens_that_it_gains_alone(
        self,
        lengths,
        num_pages,
        delay,
        drafts,
        lookahead,
        prefix_cache,
        max_decode_steps,
        chunk_tokens,
        shards,
    ):
        simulation = Simulation(
            num_pages=num_pages,
            delay=delay,
            lookahead=int(lookahead),
            prefix_cache=prefix_cache,
            max_decode_steps=max_decode_steps,
            chunk_tokens=chunk_tokens,
            shards=shards,
            stop=STOP,
        )
        requests = []
        for i, (length, new, shared) in enumerate(lengths):
            prompt = prompts(i + 1, length, min(shared, length - 1))[i]
            requests.append(request(prompt, new, drafts=drafts, arrival=float(i)))
            simulation.scheduler.add(requests[-1])
        before = [list(r.tokens) for r in requests]
        simulation.run()
        for prompt, done in zip(before, requests, strict=True):
            assert done.tokens[len(prompt) :] == completion(prompt, done.max_length, STOP)
            assert simulation.ended[done] == "finished"

    def test_with_a_depth_that_each_request_chooses(self):
        simulation = Simulation(num_pages=30, lookahead=1, delay=2)
        requests = [request(p, 40, drafts=3, depth=DraftDepth(3)) for p in prompts(3, 9)]
        for each in requests:
            simulation.scheduler.add(each)
        simulation.run()
        for each in requests:
            assert each.tokens[9:] == completion(each.tokens[:9], 49)
        drafts = {d for plan in simulation.plans for shard in plan.shards for d in shard.drafts}
        assert len(drafts) > 1

    def test_in_the_order_of_arrival(self):
        simulation = Simulation(num_pages=100, max_running=1)
        requests = [request(p, arrival=float(i)) for i, p in enumerate(prompts(4, 9))]
        for each in reversed(requests):
            simulation.scheduler.add(each)
        simulation.run()
        assert list(simulation.ended) == requests

    def test_by_priority(self):
        simulation = Simulation(num_pages=100, max_running=1)
        urgent, normal = request([1, 2], priority=-1, arrival=5.0), request([1, 3], arrival=0.0)
        simulation.scheduler.add(normal)
        simulation.scheduler.add(urgent)
        simulation.run()
        assert list(simulation.ended) == [urgent, normal]

    def test_even_with_low_priority_under_load(self):
        # Urgent requests arrive faster than they are served, forever.
        simulation = Simulation(num_pages=100, max_running=1, priority_seconds=10)
        low = request([1, 2], priority=3)
        simulation.scheduler.add(low)
        for i in range(400):
            simulation.scheduler.add(request([i % 7, 2], arrival=simulation.now))
            simulation.step()
            if low in simulation.ended:
                break
        assert simulation.ended[low] == "finished"
        assert simulation.scheduler.waiting, "the load was too low to prove anything"


class TestOneStep:
    def test_prefills_within_its_budget(self):
        simulation = Simulation(num_pages=200, max_running=8, chunk_tokens=5, max_chunks=3)
        for i, prompt in enumerate(prompts(8, 23)):
            simulation.scheduler.add(request(prompt, arrival=float(i)))
        simulation.run()
        assert max(len(plan.chunks) for plan in simulation.plans) == 3
        assert all(chunk.count <= 5 for plan in simulation.plans for chunk in plan.chunks)

    def test_prefills_and_decodes_together(self):
        simulation = Simulation(num_pages=200)
        for prompt in prompts(2, 30):
            simulation.scheduler.add(request(prompt, 30))
        simulation.run()
        assert any(plan.chunks and plan.decodes for plan in simulation.plans)

    def test_a_serial_request_decodes_when_its_results_are_known(self):
        simulation = Simulation(num_pages=200, max_decode_steps=4)
        serial = ScheduledRequest([1, 2, 3], 20, is_serial=True)
        other = request([4, 5, 6], 40)
        for each in (serial, other):
            simulation.scheduler.add(each)
        in_flight = []
        schedule = simulation.scheduler.schedule

        def checked(now, *, max_decode_steps):
            in_flight.append(serial.decode_steps_in_flight)
            plan, ended = schedule(now, max_decode_steps=max_decode_steps)
            if plan and serial in plan.decodes:
                assert in_flight[-1] == 0
                assert plan.decode_steps == 1
            return plan, ended

        simulation.scheduler.schedule = checked
        simulation.run()
        assert max(in_flight) == 1, "its steps were never in flight"
        assert max(plan.decode_steps for plan in simulation.plans) > 1
        for each in (serial, other):
            assert each.tokens[3:] == completion(each.tokens[:3], each.max_length)

    @pytest.mark.parametrize("drafts", [0, 2])
    def test_decodes_several_times_only_if_nothing_can_be_admitted(self, drafts, monkeypatch):
        simulation = Simulation(num_pages=200, max_running=2, max_decode_steps=4)
        scheduler = simulation.scheduler
        for i, prompt in enumerate(prompts(3, 5)):
            scheduler.add(request(prompt, 38 + i, drafts=drafts))
        schedule = scheduler.schedule
        waiting_steps, other_steps = set(), set()

        def checked(now, *, max_decode_steps):
            plan, ended = schedule(now, max_decode_steps=max_decode_steps)
            steps = plan.decode_steps if plan else 1
            (waiting_steps if scheduler.waiting else other_steps).add(steps)
            if steps > 1:
                assert not plan.chunks
            if steps > 1 and scheduler.waiting:
                # No step follows one that may free a slot.
                for each in plan.decodes:
                    tokens = (steps - 1) * (1 + drafts)
                    assert each.least_length - steps + tokens < each.max_length
            return plan, ended

        monkeypatch.setattr(scheduler, "schedule", checked)
        simulation.run()
        assert 4 in waiting_steps
        assert 4 in other_steps

    @pytest.mark.parametrize("drafts", [0, 2])
    def test_one_request_decodes_to_its_end_while_others_wait(self, drafts):
        """A dispatch ends with its last request, so that no slot stays empty."""
        simulation = Simulation(num_pages=200, max_running=1, max_decode_steps=64)
        requests = [request(prompt, 30, drafts=drafts) for prompt in prompts(3, 5)]
        for each in requests:
            simulation.scheduler.add(each)
        simulation.run()
        longest = [plan.decode_steps for plan in simulation.plans if plan.decode_steps > 1]
        # The first token comes from the prefill.
        assert longest == [29] * 3
        for each in requests:
            assert each.tokens[5:] == completion(each.tokens[:5], each.max_length)

    def test_never_waits_for_results(self):
        # With results two steps late, decode steps follow each other without a gap.
        simulation = Simulation(num_pages=200, delay=2)
        simulation.scheduler.add(request([1, 2, 3], 10))
        simulation.run()
        assert [len(plan.decodes) for plan in simulation.plans] == [0] + [1] * 9

    def test_the_cost_of_an_admission_does_not_grow_with_the_running_requests(self, monkeypatch):
        calls = 0
        pages_for = PageAllocator.pages_for

        def counted(self, tokens):
            nonlocal calls
            calls += 1
            return pages_for(self, tokens)

        monkeypatch.setattr(PageAllocator, "pages_for", counted)
        per_request = []
        for count in (20, 200):
            scheduler = Simulation(
                num_pages=1000, max_running=count, chunk_tokens=5, max_chunks=count
            ).scheduler
            for prompt in prompts(count, 4):
                scheduler.add(request(prompt))
            calls = 0
            scheduler.schedule(0.0)
            assert len(scheduler.running) == count
            per_request.append(calls / count)
        assert per_request[1] <= per_request[0]


class TestSeparateSteps:
    """As a Generator has them: pages for every slot, and a program for each kind of step."""

    SLOTS, LONGEST = 3, 24

    def run(self, lengths: list[tuple[int, int]], refill_steps: int = 1, **options) -> Simulation:
        pages = self.SLOTS * (self.LONGEST // 4)
        simulation = Simulation(
            num_pages=pages,
            max_running=self.SLOTS,
            separate=True,
            refill_steps=refill_steps,
            prefix_cache=False,
            delay=0,
            **options,
        )
        requests = [request(prompts(i + 1, n)[-1], new) for i, (n, new) in enumerate(lengths)]
        simulation.scheduler.add(*requests)
        simulation.run()
        for each, (n, _) in zip(requests, lengths, strict=True):
            assert each.tokens[n:] == completion(each.tokens[:n], each.max_length)
        return simulation

    @given(
        lengths=st.lists(
            st.integers(1, 23).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, 24 - n))),
            min_size=1,
            max_size=10,
        ),
        refill_steps=st.integers(1, 5),
    )
    @settings(max_examples=50, deadline=None)
    def test_prefill_or_decode_and_never_lack_pages(self, lengths, refill_steps):
        simulation = self.run(lengths, refill_steps, max_decode_steps=8)
        assert not any(plan.chunks and plan.decodes for plan in simulation.plans)
        assert simulation.scheduler.preemptions == 0

    def test_every_slot_is_used_though_no_page_is_spare(self):
        simulation = self.run([(20, 4)] * 6)
        assert max(len(plan.decodes) for plan in simulation.plans) == self.SLOTS

    @pytest.mark.parametrize("refill_steps", [1, 4])
    def test_a_slot_stays_empty_for_a_few_steps_at_most(self, refill_steps):
        lengths = [(3, 2), (3, 20), (3, 20), (3, 5)]
        simulation = self.run(lengths, refill_steps, max_decode_steps=8)
        # The first request needs one decode step. The last one waits for its slot.
        first, last = (
            next(i for i, plan in enumerate(simulation.plans) if plan.decodes and not plan.chunks),
            max(i for i, plan in enumerate(simulation.plans) if plan.chunks),
        )
        assert [p.decode_steps for p in simulation.plans[first:last]] == [refill_steps]


class TestPrefixCache:
    def test_saves_the_shared_pages(self):
        simulation = Simulation(num_pages=200)
        first, second = (request(p) for p in prompts(2, 30, shared=21))
        simulation.scheduler.add(first)
        simulation.run()
        computed = simulation.device.tokens_computed
        simulation.scheduler.add(second)
        simulation.run()
        assert (first.cached_tokens, second.cached_tokens) == (0, 20)
        assert simulation.scheduler.prefix_hit_tokens == 20
        assert simulation.device.tokens_computed - computed < computed

    def test_shares_pages_between_running_requests(self):
        simulation = Simulation(num_pages=200, chunk_tokens=32, max_chunks=1)
        for i, prompt in enumerate(prompts(3, 30, shared=21)):
            simulation.scheduler.add(request(prompt, 20, arrival=float(i)))
        simulation.step()
        simulation.step()
        first, second = simulation.scheduler.running
        assert first.pages[:5] == second.pages[:5]
        assert not set(first.pages[5:]) & set(second.pages[5:])
        simulation.run()

    # Of 40 tokens, the last was never fed. MTP entries of the last decode step are not written.
    @pytest.mark.parametrize(
        ("lookahead", "drafts", "cached"), [(0, 0, 36), (1, 0, 36), (1, 3, 32)]
    )
    def test_serves_a_conversation(self, lookahead, drafts, cached):
        # The next turn's prompt holds the tokens that were generated before.
        simulation = Simulation(num_pages=200, lookahead=lookahead)
        first = request([1] * 20, 20, drafts=drafts)
        simulation.scheduler.add(first)
        simulation.run()
        following = request([*first.tokens, 5, 6], 5, drafts=drafts)
        simulation.scheduler.add(following)
        simulation.run()
        assert following.cached_tokens == cached

    def test_computes_at_least_one_token_of_a_known_prompt(self):
        simulation = Simulation(num_pages=200)
        for _ in range(2):
            again = request([2] * 20)
            simulation.scheduler.add(again)
            simulation.run()
        assert again.cached_tokens == 16


class TestPreemption:
    def run(self, **options) -> tuple[Simulation, list[ScheduledRequest]]:
        simulation = Simulation(num_pages=14, **options)
        requests = [request(p, 24, arrival=float(i)) for i, p in enumerate(prompts(4, 8))]
        for each in requests:
            simulation.scheduler.add(each)
        simulation.run()
        return simulation, requests

    @pytest.mark.parametrize("delay", [0, 1, 2])
    def test_takes_the_last_request_and_loses_no_token(self, delay):
        simulation, requests = self.run(delay=delay)
        assert simulation.scheduler.preemptions > 0
        assert requests[0].preemptions == 0
        for each in requests:
            assert each.tokens[8:] == completion(each.tokens[:8], 32)

    def test_keeps_the_tokens_of_steps_in_flight(self):
        simulation = Simulation(num_pages=100, delay=3)
        preempted = request([1, 2, 3], 20)
        simulation.scheduler.add(preempted)
        for _ in range(4):
            simulation.step()
        simulation.scheduler.shards[0].preempt(preempted)
        in_flight = preempted.dispatches_in_flight
        known = len(preempted.tokens)
        while simulation.unread:
            simulation.read()
        assert in_flight == 3
        assert len(preempted.tokens) == known + in_flight
        assert simulation.scheduler.waiting == [preempted]
        simulation.run()
        assert preempted.tokens[3:] == completion([1, 2, 3], 23)

    def test_is_avoided_by_leaving_a_page_to_every_running_request(self):
        # Ten pages; the first request has four and will need a fifth, the second needs six.
        simulation = Simulation(num_pages=10)
        simulation.scheduler.add(request([1] * 15, 5))
        simulation.step()
        simulation.scheduler.add(request([2] * 20, 4, arrival=1.0))
        simulation.run()
        assert simulation.scheduler.preemptions == 0

    def test_admits_nobody_before_the_preempted_request(self):
        simulation = Simulation(num_pages=14, delay=2)
        requests = [request(p, 24, arrival=float(i)) for i, p in enumerate(prompts(2, 20))]
        for each in requests:
            simulation.scheduler.add(each)
        while not simulation.scheduler.preemptions:
            simulation.step()
        late = request([5], 3, arrival=99.0)
        simulation.scheduler.add(late)
        simulation.run()
        admitted = [c.request for plan in simulation.plans for c in plan.chunks if c.is_first]
        assert admitted == [*requests, requests[1], late]

    def test_does_not_count_as_a_prefix_hit(self):
        simulation, requests = self.run()
        assert simulation.scheduler.preemptions > 0
        assert simulation.scheduler.prefix_queried_tokens == sum(8 for _ in requests)

    def test_recomputes_little_with_a_prefix_cache(self):
        with_cache, _ = self.run()
        without, _ = self.run(prefix_cache=False)
        assert with_cache.device.tokens_computed <= without.device.tokens_computed


class TestShards:
    def test_share_the_requests(self):
        simulation = Simulation(num_pages=100, shards=3, max_running=2)
        for i, prompt in enumerate(prompts(6, 9)):
            simulation.scheduler.add(request(prompt, 20, arrival=float(i)))
        simulation.step()
        assert [len(shard.running) for shard in simulation.scheduler.shards] == [2, 2, 2]
        simulation.run()

    def test_have_a_budget_each(self):
        simulation = Simulation(
            num_pages=200, shards=2, max_running=8, chunk_tokens=5, max_chunks=3
        )
        for i, prompt in enumerate(prompts(12, 23)):
            simulation.scheduler.add(request(prompt, arrival=float(i)))
        simulation.run()
        shards = [shard for plan in simulation.plans for shard in plan.shards]
        assert max(len(shard.chunks) for shard in shards) == 3
        assert max(len(plan.chunks) for plan in simulation.plans) == 6
        assert max(len(shard.decodes) for shard in shards) <= 8

    def test_admit_in_the_order_of_arrival(self):
        # The first request needs more than any shard has left, and the last one could run.
        simulation = Simulation(num_pages=10, shards=2)
        for i in range(2):
            simulation.scheduler.add(request([i] * 20, 12, arrival=float(i)))
        simulation.step()
        large, small = request([5] * 30, 5, arrival=2.0), request([6], 2, arrival=3.0)
        simulation.scheduler.add(large)
        simulation.scheduler.add(small)
        simulation.run()
        admitted = [c.request for plan in simulation.plans for c in plan.chunks if c.is_first]
        assert admitted.index(large) < admitted.index(small)

    def test_preempt_their_own_requests_only(self):
        # The first shard runs requests 0 and 3, and the second one has too few pages for 1 and 2.
        simulation = Simulation(num_pages=14, shards=2, chunk_tokens=32)
        sizes = [(20, 24), (1, 24), (20, 24), (1, 5)]
        requests = [
            request([i] * length, new, arrival=float(i)) for i, (length, new) in enumerate(sizes)
        ]
        for each in requests:
            simulation.scheduler.add(each)
        simulation.step()
        assert [each.shard for each in requests] == [0, 1, 1, 0]
        simulation.run()
        assert [each.preemptions > 0 for each in requests] == [False, False, True, False]
        for each, (length, new) in zip(requests, sizes, strict=True):
            assert each.tokens[length:] == completion(each.tokens[:length], length + new)

    @pytest.mark.parametrize("delay", [0, 2])
    def test_admit_nobody_before_a_preempted_request(self, delay):
        simulation = Simulation(num_pages=14, shards=2, delay=delay, max_running=2)
        requests = [request(p, 24, arrival=float(i)) for i, p in enumerate(prompts(4, 20))]
        for each in requests:
            simulation.scheduler.add(each)
        while not simulation.scheduler.preemptions:
            simulation.step()
        preempted = next(each for each in requests if each.preemptions)
        late = request([5], 3, arrival=99.0)
        simulation.scheduler.add(late)
        simulation.run()
        admitted = [c.request for plan in simulation.plans for c in plan.chunks if c.is_first]
        assert admitted[-1] is late
        assert admitted.count(preempted) == 1 + preempted.preemptions

    def test_low_priority_does_not_starve(self):
        simulation = Simulation(num_pages=100, shards=2, max_running=1, priority_seconds=10)
        low = request([1, 2], priority=3)
        simulation.scheduler.add(low)
        for i in range(400):
            for j in range(2):
                simulation.scheduler.add(request([i % 7, j], arrival=simulation.now))
            simulation.step()
            if low in simulation.ended:
                break
        assert simulation.ended[low] == "finished"
        assert simulation.scheduler.waiting, "the load was too low to prove anything"

    @staticmethod
    def admit(scheduler: Scheduler, *requests: ScheduledRequest) -> None:
        """Schedules requests one after the other, whose results never come."""
        for each in requests:
            scheduler.add(each)
            scheduler.schedule(0.0)

    def test_keep_prompts_that_begin_alike_together(self):
        scheduler = Simulation(num_pages=999, shards=3, chunk_tokens=999).scheduler
        requests = [request(p) for p in ([1] * 500, [2] * 400, [3] * 9, [1] * 400 + [4])]
        self.admit(scheduler, *requests)
        assert [each.shard for each in requests] == [0, 1, 2, 0]
        assert requests[3].cached_tokens == 400
        scheduler.check_integrity()

    def test_spread_a_popular_prefix(self):
        scheduler = Simulation(num_pages=999, shards=2, max_running=99, chunk_tokens=999).scheduler
        requests = [request([1] * 500 + [i % 7, i // 7]) for i in range(24)]
        self.admit(scheduler, *requests)
        # Others follow the first one until its shard has 1,000 tokens more of load. Then the second
        # shard computes the prefix too.
        shards = [each.shard for each in requests]
        assert shards[:3] == [0, 0, 1]
        assert shards.count(1) == 12
        assert [each.cached_tokens for each in requests].count(0) == 2

    def test_refuse_a_request_that_no_shard_can_hold(self):
        scheduler = Simulation(num_pages=5, shards=2).scheduler
        with pytest.raises(ValueError, match=r"20 tokens \(cache_tokens, divided by 2 shards\)"):
            scheduler.add(request([1] * 10, 11))

    def test_integrity_notices_a_page_of_another_shard(self):
        simulation = Simulation(num_pages=20, shards=2)
        for prompt in prompts(2, 9):
            simulation.scheduler.add(request(prompt))
        simulation.step()
        first, second = simulation.scheduler.running
        first.pages, second.pages = second.pages, first.pages
        with pytest.raises(AssertionError, match="another allocator"):
            simulation.scheduler.check_integrity()


class TestEndedRequests:
    @pytest.mark.parametrize("steps", range(6))
    def test_cancelled(self, steps):
        simulation = Simulation(num_pages=100, max_running=2)
        requests = [request(p, 20, arrival=float(i)) for i, p in enumerate(prompts(3, 9))]
        for each in requests:
            simulation.scheduler.add(each)
        for _ in range(steps):
            simulation.step()
        simulation.scheduler.cancel(requests[1])
        simulation.step()
        assert simulation.ended[requests[1]] == "cancelled"
        assert requests[1].phase is Phase.ENDED
        simulation.run()
        for i in (0, 2):
            assert requests[i].tokens[9:] == completion(requests[i].tokens[:9], 29)

    def test_overdue(self):
        simulation = Simulation(num_pages=100, max_running=1)
        running = request([1, 2], 50, deadline=8.0)
        waiting = request([1, 3], 5, deadline=4.0)
        for each in (running, waiting):
            simulation.scheduler.add(each)
        simulation.run()
        assert simulation.ended == {waiting: "timeout", running: "timeout"}
        assert 2 < len(running.tokens) < 50


class TestRefusals:
    def test_a_full_queue(self):
        scheduler = Simulation(num_pages=100, max_waiting=2).scheduler
        for _ in range(2):
            scheduler.add(request([1]))
        with pytest.raises(QueueFullError, match="fewer than 2 requests, got 2"):
            scheduler.add(request([1]))
        scheduler.check_integrity()

    def test_a_request_larger_than_the_cache(self):
        scheduler = Simulation(num_pages=5).scheduler
        scheduler.add(request([1] * 10, 10))
        with pytest.raises(ValueError, match=r"at most 20 tokens .*got 21"):
            scheduler.add(request([1] * 10, 11))

    @pytest.mark.parametrize("name", ["max_running", "chunk_tokens", "max_chunks", "max_waiting"])
    def test_limits_below_one(self, name):
        limits = {"max_running": 1, "chunk_tokens": 1, "max_chunks": 1, name: 0}
        with pytest.raises(ValueError, match=f"{name}: expected 1 or more, got 0"):
            SchedulerConfig(**limits)

    def test_integrity_notices_a_lost_page(self):
        pages = PageAllocator(4, 4)
        scheduler = Scheduler(SchedulerConfig(2, 4, 2), [pages])
        scheduler.check_integrity()
        pages.allocate(1)
        with pytest.raises(AssertionError, match="differ"):
            scheduler.check_integrity()


class RandomOperations(RuleBasedStateMachine):
    """Submits, cancels, times out and steps in any order, with few pages and late results."""

    OPTIONS: ClassVar[dict] = {}

    @initialize(
        delay=st.integers(0, 2),
        drafts=st.integers(0, 2),
        lookahead=st.integers(0, 1),
        num_pages=st.integers(12, 24),
        shards=st.integers(1, 3),
        separate=st.booleans(),
    )
    def begin(self, delay, drafts, lookahead, num_pages, shards, separate):
        self.simulation = Simulation(
            num_pages=num_pages,
            delay=delay,
            lookahead=lookahead,
            shards=shards,
            max_waiting=6,
            max_decode_steps=2,
            stop=STOP,
            separate=separate,
            **self.OPTIONS,
        )
        self.drafts = drafts
        self.prompts: dict[ScheduledRequest, list[int]] = {}

    @rule(
        length=st.integers(1, 20),
        shared=st.integers(0, 19),
        new=st.integers(1, 20),
        priority=st.integers(-1, 1),
        patience=st.sampled_from([2.0, 20.0, 1e9]),
    )
    def submit(self, length, shared, new, priority, patience):
        now = self.simulation.now
        prompt = prompts(len(self.prompts) + 1, length, min(shared, length))[-1]
        each = request(
            prompt, new, drafts=self.drafts, priority=priority, arrival=now, deadline=now + patience
        )
        try:
            self.simulation.scheduler.add(each)
        except QueueFullError:
            return
        self.prompts[each] = prompt

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def cancel(self, data):
        self.simulation.scheduler.cancel(data.draw(st.sampled_from(list(self.prompts))))

    @rule(count=st.integers(1, 4))
    def step(self, count):
        for _ in range(count):
            self.simulation.step()

    @rule()
    def evict(self):
        self.simulation.scheduler.clear_prefix_cache()

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "simulation"):
            self.simulation.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "simulation"):
            return
        self.simulation.run()
        for each, prompt in self.prompts.items():
            expected = completion(prompt, each.max_length, STOP)
            gained = each.tokens[len(prompt) :]
            assert gained == expected[: len(gained)]
            if self.simulation.ended[each] == "finished":
                assert gained == expected


TestRandomOperations = RandomOperations.TestCase
TestRandomOperations.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
