"""Engine.use: requests after it are those of the new model, and nothing of the old one is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.engine import Engine, EngineError
from dsv3_jax.model import DeepSeekV3
from sharding import Placement
from tests.engine.conftest import BUCKETS, MAX_LEN

PROMPT = list(range(20, 70))  # three pages and four chunks
SETTINGS = {"max_new_tokens": 12, "ignore_eos": True}


def copied(model: DeepSeekV3, change: Callable[[jax.Array], jax.Array] = jnp.copy) -> DeepSeekV3:
    """A model with arrays of its own."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(change, state))


@pytest.fixture(scope="module")
def other(tiny_mtp) -> DeepSeekV3:
    """A model that writes other tokens."""
    return copied(tiny_mtp, lambda x: x[..., ::-1])


@pytest.fixture(scope="module")
def expected(alone, tiny_mtp, other) -> tuple[list[int], list[int]]:
    """Tokens of the first and of the second model."""
    tokens = []
    for model in (tiny_mtp, other):
        alone.use(model)
        tokens.append(alone.generate(PROMPT, **SETTINGS)[0].tokens)
    alone.use(tiny_mtp)
    assert tokens[0] != tokens[1]
    return tokens[0], tokens[1]


@pytest.fixture(scope="module")
def shared(tiny_mtp) -> Engine:
    return Engine(
        tiny_mtp, None, MAX_LEN, max_running=4, background=False, buckets=BUCKETS, page_size=16
    )


@pytest.fixture
def engine(shared, tiny_mtp) -> Engine:
    shared.use(tiny_mtp)
    return shared


def serve(engine: Engine, prompt: list[int] = PROMPT) -> list[int]:
    handle = engine.submit(prompt, **SETTINGS)
    while engine.step():
        engine.check_integrity()
    return handle.result(0).tokens


def test_later_requests_are_those_of_the_new_model(engine, other, expected):
    assert [serve(engine), serve(engine)] == [expected[0]] * 2
    hits = engine.stats().prefix_hit_tokens
    assert hits > 0
    programs = set(engine._executor.programs._compiled)
    engine.use(other)
    assert serve(engine) == expected[1]
    assert engine.stats().prefix_hit_tokens == hits
    assert serve(engine) == expected[1]
    assert engine.stats().prefix_hit_tokens > hits
    assert set(engine._executor.programs._compiled) == programs


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_running_request_leaves_nothing_to_later_ones(engine, other, expected, steps):
    """Its pages hold latents of both models. The prefix index gets the beginning of its prompt from
    another request, and must not continue that with its later pages."""
    first = engine.submit(PROMPT, max_new_tokens=40, ignore_eos=True)
    for _ in range(steps):
        engine.step()
    engine.use(other)
    assert serve(engine) == expected[1]  # while the first one runs
    longer = [*PROMPT, *first.result(0).tokens][:-5]
    after_use = serve(engine, longer)
    engine.clear_prefix_cache()
    assert serve(engine, longer) == after_use


def test_the_model_before_is_freed(tiny_mtp):
    first, second = copied(tiny_mtp), copied(tiny_mtp)
    engine = Engine(first, None, MAX_LEN, max_running=4, background=False, buckets=BUCKETS)
    watched = [weakref.ref(x) for x in jax.tree.leaves(nnx.state(first))]
    del first
    engine.use(second)
    gc.collect()
    assert [each() for each in watched if each() is not None] == []


@pytest.mark.slow
def test_other_placements_give_the_same_tokens(tiny_mtp, alone):
    """Also to a request that is running meanwhile."""
    random = np.random.default_rng(0)
    shape = len(tiny_mtp.moe_layers()), tiny_mtp.config.n_routed_experts
    placements = [Placement.balanced(random.zipf(1.5, shape), 16, 4, 2, 8) for _ in range(3)]
    models = [tiny_mtp.place_experts(placement) for placement in placements]
    engine = Engine(models[0], None, MAX_LEN, max_running=4, background=False, buckets=BUCKETS)
    handle = engine.submit(PROMPT, max_new_tokens=30, ignore_eos=True)
    for model in models:
        for _ in range(3):
            engine.step()
        engine.use(model)
    while engine.step():
        pass
    expected = alone.generate(PROMPT, max_new_tokens=30, ignore_eos=True)[0].tokens
    assert handle.result(0).tokens == expected


def test_another_model_is_refused_and_the_engine_goes_on(engine, tiny_mtp, expected):
    wrong = nnx.clone(tiny_mtp)
    wrong.attn_impl = "CC"
    with pytest.raises(ValueError, match="attn_impl of the model in use"):
        engine.use(wrong)
    assert serve(engine) == expected[0]


def test_after_shutdown(tiny_mtp):
    engine = Engine(tiny_mtp, None, MAX_LEN, max_running=4, background=False, buckets=BUCKETS)
    engine.shutdown()
    with pytest.raises(EngineError, match="was shut down"):
        engine.use(tiny_mtp)


@pytest.mark.slow
def test_from_another_thread(tiny_mtp, other, expected):
    with Engine(tiny_mtp, None, MAX_LEN, max_running=4, buckets=BUCKETS) as engine:
        running = engine.submit(PROMPT, max_new_tokens=60, ignore_eos=True)
        engine.use(other)
        assert engine.submit(PROMPT, **SETTINGS).result(60).tokens == expected[1]
        assert len(running.result(60).tokens) == 60
