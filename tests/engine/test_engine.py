"""The engine gives every request the tokens that the Generator gives it alone."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dsv3_jax
from dsv3_jax.engine import Engine, EngineError, EngineRequest, QueueFullError
from dsv3_jax.engine.device.executor import Launcher
from dsv3_jax.generation.completion import Completion
from dsv3_jax.generation.errors import NonFiniteLogitsError
from dsv3_jax.offline.generator import Generator
from sharding import make_layout
from tests.engine.conftest import BUCKETS, MAX_LEN
from tests.engine.test_loop import consume, in_threads

# test_random_trace.py has the others.
ENGINES = {
    "plain": {},
    "mtp_few_pages": {"draft": "mtp", "draft_depth": 1, "cache_tokens": 16 * 9, "page_size": 16},
    "ngram": {"draft": "ngram", "draft_depth": 3},
    "mtp_auto": {"draft": "mtp", "draft_depth": "auto"},
}


def make(model, **options) -> Engine:
    defaults = {"max_running": 4, "background": False, "buckets": BUCKETS}
    return Engine(model, None, MAX_LEN, **(defaults | options))


class Traced(NamedTuple):
    """A request of the trace."""

    prompt: list[int]
    max_new_tokens: int
    ignore_eos: bool


def trace(count: int = 20, seed: int = 0) -> list[Traced]:
    """Long prompts with a shared beginning and few new tokens, and short prompts with many."""
    random = np.random.default_rng(seed)
    shared = random.integers(2, 160, 80).tolist()
    requests = []
    for i in range(count):
        length = int(random.integers(66, 100) if i % 2 else random.integers(1, 60))
        prompt = random.integers(2, 160, length).tolist()
        if i % 2:
            prompt[: length - 2] = shared[: length - 2]
        new = MAX_LEN - length if i % 4 == 0 else int(random.integers(1, MAX_LEN - length + 1))
        requests.append(Traced(prompt, new, ignore_eos=i % 4 < 3))
    return requests


def submit(engine: Engine, traced: Traced, **settings) -> EngineRequest:
    return engine.submit(
        traced.prompt,
        max_new_tokens=traced.max_new_tokens,
        ignore_eos=traced.ignore_eos,
        **settings,
    )


def run(engine: Engine, limit: int = 3000) -> None:
    """Steps until nothing is left."""
    for _ in range(limit):
        worked = engine.step()
        engine.check_integrity()
        if not worked:
            return
    raise AssertionError("the engine does not become idle")


@pytest.fixture(scope="module")
def expected(alone):
    """Greedy and sampled completions of the trace by the Generator."""
    prompts, max_new_tokens, ignore_eos = map(list, zip(*trace(), strict=True))

    def of(**settings):
        return alone.generate(
            prompts,
            max_new_tokens=max_new_tokens,
            ignore_eos=ignore_eos,
            seed=list(range(len(prompts))),
            **settings,
        )

    return {
        "greedy": of(),
        "unfiltered": of(temperature=0.9),
        "sampled": of(temperature=0.9, top_p=0.95),
    }


# In the quick suite: the engine that does everything at once.
QUICK = ("mtp_few_pages",)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ENGINES],
)
def test_greedy_tokens_are_those_of_the_generator(tiny_mtp, expected, name):
    engine = make(tiny_mtp, **ENGINES[name])
    handles = [submit(engine, traced) for traced in trace()]
    run(engine)
    for handle, completion in zip(handles, expected["greedy"], strict=True):
        got = handle.result(0)
        assert got.tokens == completion.tokens
        assert got.finish_reason == completion.finish_reason
        np.testing.assert_allclose(got.logprobs, completion.logprobs, atol=2e-5)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.cache_usage) == (0, 0, 0.0)
    speculations = [h.result(0).speculation for h in handles]
    accepted = [sum(s.accepted) if s is not None else 0 for s in speculations]
    assert [len(handle.accepted_drafts) for handle in handles] == accepted
    assert stats.accepted_tokens == sum(accepted)
    assert stats.drafted_tokens == sum(sum(s.drafted) for s in speculations if s is not None)
    if "few_pages" in name:
        assert stats.preemptions > 0
    if "few_pages" not in name:
        assert stats.prefix_hit_tokens > 0


@pytest.mark.slow
def test_sampled_tokens_are_those_of_the_generator(tiny_mtp, expected):
    engine = make(tiny_mtp)
    handles, others = [], []
    for i, traced in enumerate(trace()):
        handles.append(submit(engine, traced, temperature=0.9, top_p=0.95, seed=i))
        if i % 4 == 3:  # these run in the same steps
            others.append((submit(engine, traced), expected["greedy"][i]))
        if i % 4 == 1:
            unfiltered = submit(engine, traced, temperature=0.9, seed=i)
            others.append((unfiltered, expected["unfiltered"][i]))
    run(engine)
    for handle, completion in zip(handles, expected["sampled"], strict=True):
        assert handle.result(0).tokens == completion.tokens
    for handle, completion in others:
        assert handle.result(0).tokens == completion.tokens


@pytest.fixture(scope="module")
def engine(tiny_mtp) -> Engine:
    """One engine for the tests that need no other."""
    return make(tiny_mtp)


class TestHandles:
    def test_pieces_make_up_the_completion(self, engine):
        request = engine.submit([5, 6, 7], max_new_tokens=9, ignore_eos=True)
        run(engine)
        pieces = list(request)
        assert [t for piece in pieces for t in piece.tokens] == request.result().tokens
        assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == "length"
        assert list(request) == pieces  # again from the beginning

    def test_result_waits_for_its_timeout_only(self, engine):
        request = engine.submit([5, 6, 7], max_new_tokens=4)
        with pytest.raises(TimeoutError, match=r"expected its end within 0\.01 s"):
            request.result(0.01)
        run(engine)
        assert request.result(0).prompt_tokens == 3

    @pytest.mark.slow
    def test_top_log_probabilities(self, engine, alone):
        request = engine.submit([5, 6, 7], max_new_tokens=4, logprobs=3, ignore_eos=True)
        run(engine)
        (wanted,) = alone.generate([[5, 6, 7]], max_new_tokens=4, logprobs=3, ignore_eos=True)
        got = request.result().top_logprobs
        assert [[t for t, _ in top] for top in got] == [
            [t for t, _ in top] for top in wanted.top_logprobs
        ]

    def test_cached_tokens_are_reported(self, engine):
        engine.clear_prefix_cache()
        prompt = list(range(2, 80))
        first = engine.submit(prompt, max_new_tokens=2)
        run(engine)
        second = engine.submit(prompt, max_new_tokens=2)
        run(engine)
        assert (first.result().cached_tokens, second.result().cached_tokens) == (0, 64)
        assert second.result().tokens == first.result().tokens


class TestEnds:
    @pytest.mark.parametrize("steps", [0, 1, 2, 4])
    def test_cancelled_within_one_step(self, engine, steps):
        other = engine.submit([9, 8, 7], max_new_tokens=12, ignore_eos=True)
        request = engine.submit([5, 6, 7], max_new_tokens=100, ignore_eos=True)
        for _ in range(steps):
            engine.step()
        request.cancel()
        engine.step()
        completion = request.result(0)
        assert completion.finish_reason == "cancelled"
        assert len(completion.tokens) <= 3 * steps
        run(engine)
        assert len(other.result(0).tokens) == 12

    def test_timeout(self, engine):
        request = engine.submit([5, 6, 7], max_new_tokens=100, timeout=0.0)
        run(engine)
        assert request.result(0).finish_reason == "timeout"

    def test_stop_tokens(self, engine):
        request = engine.submit([5, 6, 7], max_new_tokens=20, ignore_eos=True)
        run(engine)
        tokens = request.result().tokens
        stopped = engine.submit(
            [5, 6, 7], max_new_tokens=20, ignore_eos=True, stop_tokens=[tokens[5]]
        )
        run(engine)
        assert stopped.result().tokens == tokens[: tokens.index(tokens[5]) + 1]
        assert stopped.result().finish_reason == "stop"

    def test_cancelling_a_finished_request_does_nothing(self, engine):
        request = engine.submit([5, 6], max_new_tokens=2, ignore_eos=True)
        run(engine)
        request.cancel()
        run(engine)
        assert request.result().finish_reason == "length"


class TestRefusals:
    def test_bad_settings_are_refused_at_once(self, engine):
        with pytest.raises(ValueError, match="temperature: expected"):
            engine.submit([5], temperature=-1.0)
        with pytest.raises(ValueError, match="expected at least one"):
            engine.submit([])
        with pytest.raises(ValueError, match="max_new_tokens: expected at most"):
            engine.submit([5], max_new_tokens=MAX_LEN)
        assert engine.stats().waiting == 0

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_running": 0}, "max_running: expected an integer of at least 1, got 0"),
            ({"page_size": 0}, "page_size: expected 1 or more, got 0"),
            ({"cache_tokens": 63}, "cache_tokens: expected at least a page, 64, got 63"),
            ({"draft": "eagle"}, "draft: expected None, 'mtp', 'ngram'"),
        ],
    )
    def test_bad_options(self, tiny_mtp, options, message):
        with pytest.raises(ValueError, match=message):
            make(tiny_mtp, **options)

    def test_the_default_cache_has_the_pages_of_the_longest_request_for_every_slot(self, tiny_mtp):
        """On devices that do not report their memory, such as CPUs."""
        options = {"max_running": 3, "page_size": 64, "background": False}
        drafting = {"draft": "mtp", "draft_depth": 2}
        assert Engine(tiny_mtp, None, 90, **options).stats().cache_tokens == 3 * 2 * 64
        assert Engine(tiny_mtp, None, 127, **options, **drafting).stats().cache_tokens == 3 * 3 * 64

    def test_a_length_past_the_last_position(self, tiny_mtp):
        with pytest.raises(ValueError, match=r"max_len: expected 2 to 128 .*got 129"):
            Engine(tiny_mtp, None, 129)

    def test_a_full_queue(self, tiny_mtp):
        engine = make(tiny_mtp, max_waiting=1)
        engine.submit([5])
        with pytest.raises(QueueFullError):
            engine.submit([5])

    def test_step_of_an_engine_with_a_thread(self, tiny_mtp):
        with (
            make(tiny_mtp, background=True) as engine,
            pytest.raises(ValueError, match="background=False"),
        ):
            engine.step()

    def test_a_request_after_shutdown(self, tiny_mtp):
        engine = make(tiny_mtp)
        engine.shutdown()
        with pytest.raises(EngineError, match="shut down"):
            engine.submit([5])


@pytest.fixture(scope="module")
def served(tiny_mtp):
    """An engine with a thread."""
    with make(tiny_mtp, background=True) as engine:
        yield engine


class TestThread:
    def test_serves_requests_of_several_threads(self, served, expected):
        handles = [submit(served, traced) for traced in trace()]
        for handle, completion in zip(handles, expected["greedy"], strict=True):
            assert handle.result(60).tokens == completion.tokens

    def test_streams(self, served):
        request = served.submit([5, 6, 7], max_new_tokens=20, ignore_eos=True)
        assert len([t for piece in request for t in piece.tokens]) == 20
        assert all(piece.top_logprobs is None for piece in request)
        request = served.submit([5, 6, 7], max_new_tokens=9, logprobs=3, ignore_eos=True)
        tops = [top for piece in request for top in piece.top_logprobs]
        assert tops == request.result().top_logprobs
        assert [p for piece in request for p in piece.logprobs] == request.result().logprobs

    def test_streams_asynchronously(self, served):
        async def collect(request: EngineRequest) -> list[int]:
            return [t async for piece in request for t in piece.tokens]

        async def both() -> list[list[int]]:
            requests = [served.submit([5, i], max_new_tokens=9, ignore_eos=True) for i in (6, 7)]
            return await asyncio.gather(*map(collect, requests))

        assert [len(tokens) for tokens in asyncio.run(both())] == [9, 9]

    def test_results_are_awaited(self, served):
        async def both() -> list[Completion]:
            requests = [served.submit([5, i], max_new_tokens=9, ignore_eos=True) for i in (6, 7)]
            completions = await asyncio.gather(*(r.async_result() for r in requests))
            assert [r.result(0) for r in requests] == completions
            assert completions[0] is await requests[0].async_result()
            return completions

        assert [len(completion.tokens) for completion in asyncio.run(both())] == [9, 9]

    def test_shutdown_finishes_requests(self, tiny_mtp):
        engine = make(tiny_mtp, background=True)
        request = engine.submit([5, 6, 7], max_new_tokens=20, ignore_eos=True)
        engine.shutdown()
        assert len(request.result(0).tokens) == 20

    def test_shutdown_without_draining_cancels(self, tiny_mtp):
        engine = make(tiny_mtp, background=True)
        requests = [engine.submit([5, i], max_new_tokens=110, ignore_eos=True) for i in range(9)]
        engine.shutdown(drain=False)
        assert "cancelled" in {request.result(0).finish_reason for request in requests}

    @pytest.mark.parametrize("name", ["dispatch", pytest.param("wait", marks=pytest.mark.slow)])
    def test_an_error_of_the_device_reaches_every_request(self, tiny_mtp, monkeypatch, name):
        engine = make(tiny_mtp, background=True)
        monkeypatch.setattr(engine._executor, name, lambda *plan: 1 / 0)
        requests = [engine.submit([5, 6, i]) for i in range(3)]
        for request in requests:
            with pytest.raises(EngineError, match="a step failed: division by zero"):
                request.result(60)
        with pytest.raises(EngineError, match="a step failed"):
            engine.submit([5])
        engine.shutdown()
        engine.check_integrity()
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.cache_usage) == (0, 0, 0.0)

    @pytest.mark.slow
    def test_eight_threads_read_in_three_ways(self, served, expected):
        def work(thread: int) -> None:
            for i in range(thread, 20, 8):
                request = submit(served, trace()[i])
                assert consume(request, i) == expected["greedy"][i].tokens
                other = submit(served, trace()[i])
                other.cancel()
                tokens = consume(other, i + 1)
                assert tokens == expected["greedy"][i].tokens[: len(tokens)]
                served.check_integrity()

        in_threads(work)

    @pytest.mark.slow
    def test_an_engine_that_nobody_refers_to_finishes_and_frees_its_memory(self, tiny_mtp):
        engine = make(tiny_mtp, background=True)
        thread, arrays = engine._loop._thread, jax.tree.leaves(engine._executor._launcher.state)
        request = engine.submit([5, 6, 7], max_new_tokens=20, ignore_eos=True)
        del engine
        assert len(request.result(60).tokens) == 20
        thread.join(60)
        assert not thread.is_alive()
        assert all(array.is_deleted() for array in arrays)
        assert request.result(0).finish_reason == "length"


def test_a_broken_request_hurts_no_other(tiny_mtp):
    # Token 3 has an embedding that is not finite.
    model = nnx.clone(tiny_mtp)
    table = model.embed_tokens.weight
    table.set_value(table.get_value().at[3].set(np.nan))
    engine = make(model)
    good = engine.submit([5, 6, 7], max_new_tokens=6, ignore_eos=True)
    broken = engine.submit([5, 3, 7], max_new_tokens=6, ignore_eos=True)
    run(engine)
    assert len(good.result(0).tokens) == 6
    with pytest.raises(NonFiniteLogitsError, match="finite logits for position 3") as error:
        broken.result(0)
    assert error.value.generation[0].tokens == []


@pytest.fixture(scope="module")
def warm(tiny_mtp) -> Engine:
    """An engine whose programs are all compiled."""
    engine = make(tiny_mtp)
    engine.warm_up()
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_program_is_compiled_after_warm_up(warm, temperature):
    for traced in trace(6):
        submit(warm, traced, temperature=temperature)
    run(warm)
    assert warm.stats().compiled_after_warm_up == 0


def test_a_launch_transfers_nothing_implicitly(warm, monkeypatch):
    steps = warm.stats().steps
    for traced in trace(6):
        submit(warm, traced)
    # The guard belongs to a thread, so it is set where programs are launched.
    launch = Launcher._run

    def guarded(*args):
        with jax.transfer_guard("disallow"):
            return launch(*args)

    monkeypatch.setattr(Launcher, "_run", guarded)
    # The guard notices a NumPy array that is passed to a program.
    with (
        pytest.raises(Exception, match="Disallowed host-to-device transfer"),
        jax.transfer_guard("disallow"),
    ):
        jax.jit(lambda x: x + 1)(np.ones(3))
    run(warm)
    assert warm.stats().steps > steps + 10


class TestChaos:
    """Random operations in any order leave pages, slots and queues consistent."""

    OPERATIONS = 400

    @pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
    def test_random_operations(self, chaotic, seed):
        engine = chaotic
        random = np.random.default_rng(seed)
        requests = trace(self.OPERATIONS, seed)
        open_handles: list[EngineRequest] = []
        submitted = 0
        for _ in range(self.OPERATIONS):
            operation = random.choice(["submit", "cancel", "step", "step", "evict"])
            if operation == "submit":
                settings = {
                    "timeout": float(random.choice([0.0, 0.05, 60.0])),
                    "priority": int(random.integers(-1, 2)),
                    "draft": bool(random.integers(2)),
                    "stop_tokens": random.integers(2, 160, int(random.integers(3))).tolist(),
                }
                try:
                    handle = submit(engine, requests[submitted], **settings)
                except QueueFullError:
                    continue
                open_handles.append(handle)
                submitted += 1
            elif operation == "cancel" and open_handles:
                open_handles[int(random.integers(len(open_handles)))].cancel()
            elif operation == "evict":
                engine.clear_prefix_cache()
            else:
                engine.step()
            engine.check_integrity()
        run(engine)
        assert all(handle.is_done for handle in open_handles)
        assert engine.stats().cache_usage == 0.0
        reasons = {handle.result(0).finish_reason for handle in open_handles}
        assert reasons == {"timeout", "length", "cancelled", "stop"}


@pytest.fixture(scope="module")
def chaotic(tiny_mtp) -> Engine:
    """An engine with little of everything."""
    return make(tiny_mtp, max_waiting=8, **ENGINES["mtp_few_pages"])


class TestMeshes:
    @pytest.mark.slow
    def test_a_layout_that_does_not_shard_the_batch(self):
        layout = make_layout("tp_attention_ep", devices=jax.devices()[:4])
        sharded = dsv3_jax.load("demo", layout=layout, dtype=jnp.float32)[0]
        plain = dsv3_jax.load("demo", dtype=jnp.float32)[0]
        prompts = [[10 + i] * (5 * i + 1) for i in range(6)]
        wanted = Generator(plain, None, MAX_LEN, batch_sizes=(8,)).generate(
            prompts, max_new_tokens=8, ignore_eos=True
        )
        engine = make(sharded, draft="mtp")
        handles = [engine.submit(p, max_new_tokens=8, ignore_eos=True) for p in prompts]
        run(engine)
        for handle, completion in zip(handles, wanted, strict=True):
            assert handle.result(0).tokens == completion.tokens

    def test_an_attention_variant_is_refused(self, tiny_mtp):
        model = nnx.clone(tiny_mtp)
        model.use_attn_impl("CC")
        with pytest.raises(ValueError, match="expected attn_impl None, got 'CC'"):
            make(model)


def test_first_tokens_come_before_those_of_running_requests(tiny_mtp, monkeypatch):
    with make(tiny_mtp) as engine:
        orders = []
        wait = engine._executor.wait

        def spy():
            plan, results = wait()
            orders.append([result.is_decode for result in results])
            return plan, results

        monkeypatch.setattr(engine._executor, "wait", spy)
        engine.submit([5, 6, 7], max_new_tokens=8, ignore_eos=True)
        for _ in range(3):
            engine.step()
        engine.submit([8, 9], max_new_tokens=2, ignore_eos=True)
        while engine.step():
            pass
    assert [False, True] in orders
    assert [True, False] not in orders


@pytest.mark.parametrize("is_ready", [False, True])
def test_results_that_were_there_before_are_read_late(is_ready, tiny_mtp, monkeypatch):
    """Their time is no measurement of the device: the loop may have slept."""
    marks = []
    with make(tiny_mtp) as engine:
        times = engine._executor.times
        finished = times.finished

        def spy(*work, is_late):
            marks.append(is_late)
            finished(*work, is_late=is_late)

        monkeypatch.setattr(times, "finished", spy)
        engine.submit([5, 6, 7], max_new_tokens=2, ignore_eos=True)
        engine.step()
        output = jax.block_until_ready(engine._executor._in_flight[-1].output.result())
        monkeypatch.setattr(type(output.tokens), "is_ready", lambda array: is_ready)
        while engine.step():
            pass
    assert set(marks) == {is_ready}
