"""Preemption to host memory, and prefixes reused in whole chunks, on a simulated device."""

from __future__ import annotations

from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from dsv3_jax.engine.scheduling.step_plan import ScheduledRequest
from dsv3_jax.engine.scheduling.stored_pages import SwapSpace
from tests.engine.simulated_device import Simulation, completion
from tests.engine.test_scheduler import STOP, RandomOperations, prompts, request


def exact(swap_pages: int, **options) -> Simulation:
    return Simulation(swap_pages=swap_pages, aligned_prefixes=True, **options)


class TestEveryRequestIsServed:
    @given(
        lengths=st.lists(
            st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 30)), min_size=1
        ),
        num_pages=st.integers(18, 40),
        swap_pages=st.integers(0, 60),
        delay=st.integers(0, 3),
        drafts=st.integers(0, 3),
        lookahead=st.booleans(),
        prefix_cache=st.booleans(),
        chunk_tokens=st.sampled_from([2, 4, 6, 8, 20]),
        shards=st.integers(1, 2),
    )
    @settings(max_examples=150, deadline=None)
    def test_and_computes_every_token_once(
        self,
        lengths,
        num_pages,
        swap_pages,
        delay,
        drafts,
        lookahead,
        prefix_cache,
        chunk_tokens,
        shards,
    ):
        """The simulated device also checks that every entry was computed as it is alone: in the
        same chunk, or by a decode step."""
        simulation = exact(
            swap_pages,
            num_pages=num_pages,
            delay=delay,
            lookahead=int(lookahead),
            prefix_cache=prefix_cache,
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
        prefilled = sum(chunk.count for plan in simulation.plans for chunk in plan.chunks)
        cached = sum(r.cached_tokens for r in requests)
        assert prefilled == sum(len(prompt) for prompt in before) - cached
        if not prefix_cache:
            assert cached == 0


class TestPreemption:
    def run(self, swap_pages: int, **options) -> tuple[Simulation, list[ScheduledRequest]]:
        simulation = exact(swap_pages, num_pages=14, chunk_tokens=4, **options)
        requests = [request(p, 24, arrival=float(i)) for i, p in enumerate(prompts(4, 8))]
        for each in requests:
            simulation.scheduler.add(each)
        simulation.run()
        for each in requests:
            assert each.tokens[8:] == completion(each.tokens[:8], 32)
        return simulation, requests

    @pytest.mark.parametrize("delay", [0, 1, 2])
    def test_moves_requests_out_and_back(self, delay):
        simulation, _ = self.run(100, delay=delay)
        outs = [swap.request for plan in simulation.plans for swap in plan.swap_outs]
        ins = [swap.request for plan in simulation.plans for swap in plan.swap_ins]
        assert len(outs) == simulation.scheduler.preemptions > 0
        assert sorted(map(id, outs)) == sorted(map(id, ins))

    def test_admits_fewer_requests_if_host_memory_is_small(self):
        def most_running(swap_pages: int) -> int:
            simulation, _ = self.run(swap_pages)
            return max(len(plan.requests) for plan in simulation.plans)

        # Each request grows to eight pages: two need 16 of 14 + H - 8.
        assert [most_running(h) for h in (0, 9, 10, 18)] == [1, 1, 2, 3]

    def test_without_host_memory_requests_run_one_at_a_time(self):
        simulation, requests = self.run(0)
        assert simulation.scheduler.preemptions == 0
        assert list(simulation.ended) == requests

    def test_keeps_shared_pages_on_the_device(self):
        simulation = exact(100, num_pages=20, chunk_tokens=4)
        requests = [
            request(p, 30, arrival=float(i)) for i, p in enumerate(prompts(3, 22, shared=20))
        ]
        for each in requests:
            simulation.scheduler.add(each)
        simulation.run()
        shared = [swap.shared for plan in simulation.plans for swap in plan.swap_ins]
        assert max(shared) == 5

    @pytest.mark.parametrize("is_cleared", [False, True])
    def test_pages_that_others_write_in_the_same_step_are_read_after_it(self, is_cleared):
        """They are not shared at all with a request that began before the index was cleared, for
        which other weights may have computed them."""
        simulation = exact(100, num_pages=14, chunk_tokens=4, delay=0)
        requests = [request(p, 24, arrival=float(i)) for i, p in enumerate(prompts(4, 8))]
        for each in requests:
            simulation.scheduler.add(each)
        swap = simulation.scheduler.shards[0].swap
        assert swap is not None
        while not swap.used:
            simulation.step()
        (swapped,) = swap.counts
        for each in requests:
            if each is not swapped:
                simulation.scheduler.cancel(each)
        pages = simulation.scheduler.shards[0].pages
        evicted = pages.allocate(pages.available)
        assert evicted is not None
        pages.release(evicted)
        if is_cleared:
            simulation.scheduler.clear_prefix_cache()
        # An urgent request has the same prompt, and is admitted just before the swapped one.
        simulation.scheduler.add(request(swapped.tokens[:8], 4, priority=-9))
        simulation.run()
        (plan,) = [plan for plan in simulation.plans if plan.swap_ins]
        assert plan.chunks
        assert plan.swap_ins[0].shared == (0 if is_cleared else 2)
        assert swapped not in plan.decodes
        assert swapped.tokens[8:] == completion(swapped.tokens[:8], 32)

    def test_an_urgent_request_that_lacks_host_memory_waits_for_those_that_hold_it(self):
        """Nothing else runs, so that only they can make room."""
        simulation = exact(12, num_pages=11, chunk_tokens=4, delay=0)
        first, second = (request(p, 12, arrival=float(i)) for i, p in enumerate(prompts(2, 16)))
        for each in (first, second):
            simulation.scheduler.add(each)
        swap = simulation.scheduler.shards[0].swap
        assert swap is not None
        while not swap.used:
            simulation.step()
        simulation.scheduler.cancel(first)
        urgent = request(prompts(3, 20)[2], 16, priority=-9)
        simulation.scheduler.add(urgent)
        simulation.run()
        assert simulation.ended == {first: "cancelled", second: "finished", urgent: "finished"}
        assert list(simulation.ended)[1:] == [second, urgent]

    def test_a_request_that_ends_in_host_memory_leaves_it(self):
        simulation = exact(100, num_pages=14, chunk_tokens=4)
        requests = [request(p, 24, arrival=float(i)) for i, p in enumerate(prompts(4, 8))]
        for each in requests:
            simulation.scheduler.add(each)
        swap = simulation.scheduler.shards[0].swap
        assert swap is not None
        while not swap.used:
            simulation.step()
        (swapped,) = swap.counts
        simulation.scheduler.cancel(swapped)
        simulation.run()
        assert simulation.ended[swapped] == "cancelled"


class TestAlignedPrefixes:
    @pytest.mark.parametrize(("chunk_tokens", "cached"), [(4, 20), (6, 12), (8, 16), (16, 16)])
    def test_hits_are_whole_chunks_and_pages(self, chunk_tokens, cached):
        simulation = exact(0, num_pages=200, chunk_tokens=chunk_tokens)
        for prompt in prompts(2, 30, shared=21):
            each = request(prompt)
            simulation.scheduler.add(each)
            simulation.run()
        assert each.cached_tokens == cached

    def test_generated_tokens_are_not_reused(self):
        simulation = exact(0, num_pages=200, chunk_tokens=4)
        first = request([1] * 20, 20)
        simulation.scheduler.add(first)
        simulation.run()
        following = request([*first.tokens, 5, 6], 5)
        simulation.scheduler.add(following)
        simulation.run()
        assert following.cached_tokens == 20


def test_integrity_notices_a_request_that_does_not_wait():
    swap = SwapSpace(4)
    swap.put(request([1]), 0, [3])
    with pytest.raises(AssertionError, match="does not wait"):
        swap.check_integrity([])


class ExactOperations(RandomOperations):
    """Random operations with host memory."""

    OPTIONS: ClassVar[dict] = {"swap_pages": 20, "aligned_prefixes": True, "chunk_tokens": 4}


TestRandomOperations = ExactOperations.TestCase
TestRandomOperations.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
