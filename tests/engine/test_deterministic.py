"""deterministic=True: a request's results are the same to the last bit, whatever else runs."""

from __future__ import annotations

import gc
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.config import ModelConfig
from dsv3_jax.engine import Engine
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.device.executor import Launcher
from dsv3_jax.engine.device.page_packing import (
    PAGES_PER_COPY,
    PagePacker,
    RequestCopier,
    SwappedRequest,
    arrays_by_name,
)
from dsv3_jax.engine.device.programs import Programs
from dsv3_jax.engine.device.state import SlotState
from dsv3_jax.engine.scheduling.stored_pages import SwapSpace
from dsv3_jax.kv_cache import CacheSpec, PagePool
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.pages import PageFormat
from sharding import make_layout
from tests.engine.conftest import MAX_LEN
from tests.support.checkpoints import tiny_config

BUCKETS = Buckets(decodes=(4,), chunks=(2,), chunk_tokens=16, max_steps=3)
CACHE_TOKENS = 16 * 16  # two of the longest requests
SWAP_TOKENS = 16 * 64


class Variant(NamedTuple):
    """A way to serve the requests."""

    options: dict
    at_a_time: int = 100
    in_reverse: bool = False


VARIANTS = {
    "two at a time": Variant({}, at_a_time=2),
    "preempted": Variant({}),
    "preempted, all else different": Variant(
        {"overlap": False, "prefix_cache": False}, in_reverse=True
    ),
}


def requests(count: int) -> list[tuple[list[int], dict]]:
    """Greedy and sampled requests. Half of the prompts begin alike."""
    random = np.random.default_rng(5)
    shared = random.integers(2, 160, 70).tolist()
    made = []
    for i in range(count):
        prompt = random.integers(2, 160, int(random.integers(30, 75))).tolist()
        if i % 2:
            common = int(random.integers(20, 70))
            prompt[:common] = shared[:common]
        settings = {
            # Three long requests need more pages than there are.
            "max_new_tokens": MAX_LEN - len(prompt) - int(random.integers(8)),
            "ignore_eos": True,
            "seed": i,
            "temperature": [0.0, 0.8, 1.2][i % 3],
            "top_p": 0.95,
            "logprobs": i % 4,
            "presence_penalty": [0.0, 0.5][i // 2 % 2],
        }
        made.append((prompt, settings))
    return made


class Served:
    """A model, its compiled program, and what it gives each request alone."""

    def __init__(self, model: DeepSeekV3, count: int, **options):
        self.model = model
        self.options = options
        self.requests = requests(count)
        self._programs: Programs | None = None
        engine = self.engine()
        engine.warm_up()
        self._programs = engine._executor.programs
        self.alone = {}
        for i in range(count):
            engine.clear_prefix_cache()
            self.alone |= self.serve(engine, [i])
        assert engine.stats().prefix_hit_tokens == engine.stats().preemptions == 0

    def engine(self, **options) -> Engine:
        """Returns an engine, which runs the program of the first one."""
        engine = make(self.model, **self.options, **options)
        if self._programs is not None:
            engine._executor.programs = self._programs
        return engine

    def serve(self, engine: Engine, order: list[int]) -> dict[int, tuple]:
        """Runs requests together. Returns their tokens and log-probabilities by number."""
        handles = {i: engine.submit(self.requests[i][0], **self.requests[i][1]) for i in order}
        while engine.step():
            engine.check_integrity()
        done = {i: handle.result(0) for i, handle in handles.items()}
        return {i: (c.tokens, c.logprobs, c.top_logprobs) for i, c in done.items()}

    def serve_all(self, engine: Engine, variant: Variant) -> dict[int, tuple]:
        order = list(range(len(self.requests)))
        order = order[::-1] if variant.in_reverse else order
        got = {}
        for begin in range(0, len(order), variant.at_a_time):
            got |= self.serve(engine, order[begin : begin + variant.at_a_time])
        return got

    def check(self, name: str) -> None:
        variant = VARIANTS[name]
        engine = self.engine(**variant.options)
        assert self.serve_all(engine, variant) == self.alone
        stats = engine.stats()
        assert (stats.prefix_hit_tokens > 0) == variant.options.get("prefix_cache", True)
        assert (stats.preemptions > 0) == ("preempted" in name)
        # Nothing was computed twice.
        prompt_tokens = sum(len(prompt) for prompt, _ in self.requests)
        assert stats.prompt_tokens == prompt_tokens - stats.prefix_hit_tokens
        assert stats.cache_usage == 0.0
        assert stats.compiled_after_warm_up == 0
        assert not swapped_requests()


def swapped_requests() -> list[SwappedRequest]:
    """The requests in host memory."""
    return [each for each in gc.get_objects() if type(each) is SwappedRequest]


def make(model: DeepSeekV3, *, deterministic: bool = True, **options) -> Engine:
    defaults = {"max_running": 4, "page_size": 16, "cache_tokens": CACHE_TOKENS}
    return Engine(
        model,
        None,
        MAX_LEN,
        buckets=BUCKETS,
        deterministic=deterministic,
        **(defaults | {"background": False} | options),
    )


@pytest.fixture(scope="module")
def plain(tiny_mtp) -> Served:
    return Served(tiny_mtp, 5, swap_tokens=SWAP_TOKENS)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def drafting(request, tiny_mtp, bfloat16_mtp) -> Served:
    model = tiny_mtp if request.param == "float32" else bfloat16_mtp
    return Served(model, 8, draft="mtp", draft_depth=2, swap_tokens=SWAP_TOKENS)


class TestBits:
    @pytest.mark.slow
    def test_without_drafts(self, plain):
        assert len(plain.engine()._executor.programs.shapes) == 1
        plain.check("preempted")

    @pytest.mark.slow
    @pytest.mark.parametrize("name", VARIANTS)
    def test_with_drafts(self, drafting, name):
        drafting.check(name)

    @pytest.mark.slow
    def test_differ_if_requests_are_prefilled_again(self, drafting):
        """The tests above would notice it."""
        engine = drafting.engine()
        engine._loop._scheduler.shards[0].swap = SwapSpace()
        got = drafting.serve_all(engine, VARIANTS["preempted"])
        assert engine.stats().preemptions > 0
        assert got != drafting.alone


def test_a_launch_with_a_preemption_transfers_nothing_implicitly(plain, monkeypatch):
    engine = plain.engine()
    launch = Launcher._run

    def guarded(*args):
        with jax.transfer_guard("disallow"):
            return launch(*args)

    monkeypatch.setattr(Launcher, "_run", guarded)
    plain.serve_all(engine, VARIANTS["preempted"])
    assert engine.stats().preemptions > 0


def test_a_cancelled_request_leaves_host_memory(plain):
    engine = plain.engine()
    handles = [engine.submit([i] * 40, max_new_tokens=70, ignore_eos=True) for i in range(2, 6)]
    while not swapped_requests():
        assert engine.step()
    for handle in handles:
        handle.cancel()
    while engine.step():
        engine.check_integrity()
    assert not swapped_requests()


def test_an_engine_with_threads(plain):
    with plain.engine(background=True) as engine:
        handles = [engine.submit(prompt, **settings) for prompt, settings in plain.requests]
        done = [handle.result(60) for handle in handles]
    assert {i: (c.tokens, c.logprobs, c.top_logprobs) for i, c in enumerate(done)} == plain.alone
    assert engine.stats().preemptions > 0


class TestRequestCopier:
    def test_copies_any_slot_and_pages(self):
        # The tenth layer's name sorts before that of the third.
        config = tiny_config(num_hidden_layers=11)
        spec = CacheSpec.of_config(ModelConfig.from_hf(config), jnp.float32, mtp=True)
        pool = PagePool.empty(spec, 40, page_size=4)
        state = SlotState.empty(pool, 3, 8, mtp_inputs=(2, 5), dtype=jnp.float32)
        random = np.random.default_rng(0)
        leaves, structure = jax.tree.flatten(state)
        filled = [jnp.asarray(100 * random.normal(size=x.shape), x.dtype) for x in leaves]
        state = jax.tree.unflatten(structure, filled)
        assert len(arrays_by_name(state.pool)) == 12
        before = jax.device_get((arrays_by_name(state.pool), jax.tree.leaves(state.slots)))
        copier = RequestCopier(state, PagePacker(state.pool, PageFormat.of(spec, 4), None))
        source = [*range(7, 7 + PAGES_PER_COPY), 2, 9]  # more than one copy
        target: list = [*range(39, 39 - PAGES_PER_COPY, -1), None, 0]
        saved = SwappedRequest()
        copier.swap_out(state, 2, source, saved)
        saved.free_device()
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves((saved.slot, saved.pages)))
        state = copier.swap_in(state, 1, target, saved)
        pages, slots = jax.device_get((arrays_by_name(state.pool), jax.tree.leaves(state.slots)))
        for name, x in before[0].items():
            wanted = x.copy()
            for page, copy in zip(source, target, strict=True):
                if copy is not None:
                    wanted[copy] = x[page]
            np.testing.assert_array_equal(pages[name], wanted)
        for got, x in zip(slots, before[1], strict=True):
            x = x.copy()
            x[1] = x[2]
            np.testing.assert_array_equal(got, x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap_tokens": -1}, "swap_tokens: expected an integer of at least 0, got -1"),
        (
            {"draft": "mtp", "draft_depth": "auto"},
            "draft_depth: expected a number with deterministic=True, got 'auto'",
        ),
        (
            {"swap_tokens": 64, "deterministic": False},
            "swap_tokens: expected None without deterministic=True, got 64",
        ),
    ],
)
def test_refusals(tiny_mtp, options, message):
    with pytest.raises(ValueError, match=message):
        make(tiny_mtp, **options)


def test_prompt_logprobs_are_refused(plain):
    with pytest.raises(ValueError, match="prompt_logprobs: expected None with deterministic=True"):
        plain.engine().submit([5], prompt_logprobs=1)


def test_a_layout_is_refused(tiny_mtp):
    model = nnx.clone(tiny_mtp)
    model.lay_out(make_layout("tp_attention_ep", devices=jax.devices()[:4]))
    with pytest.raises(ValueError, match="deterministic: expected a model on one device"):
        make(model)
