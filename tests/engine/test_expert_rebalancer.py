"""Experts move under a running engine on eight simulated devices, and its tokens stay the same."""

from __future__ import annotations

import threading
import time

import jax
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.engine import Engine
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.expert_rebalancer import ExpertRebalancer, Rebalance, imbalance
from dsv3_jax.model import DeepSeekV3
from sharding import Placement, make_layout
from tests.engine.conftest import MAX_LEN
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint

CONFIG = tiny_config(num_hidden_layers=2)
SETTINGS = {"max_new_tokens": 24, "ignore_eos": True}
PROMPTS = [[(7 * i + j * j) % 50 + 3 for j in range(10 + 3 * i)] for i in range(8)]


@pytest.fixture(scope="module")
def placed(tmp_path_factory) -> DeepSeekV3:
    """A model on eight devices, with two slots for each expert in the order of their numbers."""
    directory = tmp_path_factory.mktemp("placed")
    write_checkpoint(directory, CONFIG, random_tensors(CONFIG))
    layout = make_layout("dp_attention_ep")
    experts = CONFIG["n_routed_experts"]
    slots = -(-2 * experts // 8) * 8
    layers = len(dsv3_jax.load(directory)[0].moe_layers())
    return dsv3_jax.load(
        directory, layout=layout, placement=Placement.identity(layers, experts, slots)
    )[0]


@pytest.fixture(scope="module")
def engine(placed) -> Engine:
    return Engine(
        placed,
        None,
        MAX_LEN,
        max_running=16,
        background=False,
        page_size=16,
        buckets=Buckets(decodes=(2,), chunks=(2,), chunk_tokens=16, max_steps=1),
        count_routing=True,
    )


def serve(engine: Engine, after: int = -1, change=lambda: None) -> list[list[int]]:
    """Serves the prompts, and calls ``change`` after some steps."""
    handles = [engine.submit(prompt, **SETTINGS) for prompt in PROMPTS]
    steps = 0
    while engine.step():
        steps += 1
        if steps == after:
            change()
        engine.check_integrity()
    return [handle.result(0).tokens for handle in handles]


@pytest.mark.slow
def test_experts_move_while_requests_run_and_tokens_stay(engine, placed):
    rebalancer = ExpertRebalancer(engine, placed, least_tokens=1)
    expected = serve(engine)
    programs = set(engine._executor.programs._compiled)
    moves = []
    engine.clear_prefix_cache()
    assert serve(engine, 8, lambda: moves.append(rebalancer.rebalance())) == expected
    (move,) = moves
    assert move.has_moved
    assert move.after < move.before
    assert set(engine._executor.programs._compiled) == programs, "a move compiled a program"
    hits = engine.stats().prefix_hit_tokens
    assert serve(engine) == expected
    assert engine.stats().prefix_hit_tokens > hits, "a move must keep the prefix cache"
    # Under the same load, the engine now is as balanced as predicted.
    rebalancer.rebalance()
    serve(engine)
    again = rebalancer.rebalance()
    assert again.before < move.before


@pytest.mark.slow
def test_counts_are_those_of_the_tokens(engine):
    engine.take_routing_counts()
    engine.clear_prefix_cache()
    before = engine.stats()
    serve(engine)
    counts = engine.take_routing_counts()
    done = engine.stats().since(before)
    computed = done.prompt_tokens + done.output_tokens - len(PROMPTS)
    per_token = CONFIG["num_experts_per_tok"]
    assert counts.dtype == np.int64
    # Each request's last token is not computed, and a step in flight at its end may be.
    assert computed * per_token <= counts[0].sum() <= (computed + 2 * len(PROMPTS)) * per_token
    assert not engine.take_routing_counts().any()


@pytest.mark.slow
def test_few_tokens_move_nothing(engine, placed):
    rebalancer = ExpertRebalancer(engine, placed, least_tokens=10**9)
    assert not rebalancer.rebalance().has_moved


@pytest.mark.slow
def test_a_thread_rebalances_at_intervals(engine, placed):
    engine.use(placed)
    calls = []

    class Counting(ExpertRebalancer):
        def rebalance(self) -> Rebalance:
            calls.append(0)
            return Rebalance(0, 1.0, 1.0, False)

    rebalancer = Counting(engine, placed, interval=0.01, least_tokens=1)
    deadline = time.monotonic() + 10
    while len(calls) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    rebalancer.close()
    assert len(calls) >= 3


def test_a_move_that_fails_is_not_the_last(caplog):
    class Failing(ExpertRebalancer):
        def __init__(self):
            self._is_closed, self.calls = threading.Event(), 0

        def rebalance(self) -> Rebalance:
            self.calls += 1
            if self.calls == 1:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: a copy of the experts")
            self._is_closed.set()
            return Rebalance(0, 1.0, 1.0, False)

    rebalancer = Failing()
    rebalancer._run(0.0)
    assert rebalancer.calls == 2
    assert "experts were not moved: RESOURCE_EXHAUSTED" in caplog.text


def test_the_imbalance_of_a_placement():
    counts = np.array([[4, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    alone = np.tile(np.arange(4), (3, 1))
    assert imbalance(counts, alone, 2) == pytest.approx((2 + 1) / 2)
    replicated = np.array([[0, 1, 2, 0, 3, 0]] * 3)
    assert imbalance(counts[:1], replicated[:1], 2) == pytest.approx(8 / 3 / 2)


@pytest.mark.slow
def test_refusals(engine, placed, tiny_mtp):
    with pytest.raises(ValueError, match="model: expected experts on several devices"):
        ExpertRebalancer(engine, tiny_mtp)
    with pytest.raises(ValueError, match="interval: expected seconds above 0, got 0"):
        ExpertRebalancer(engine, placed, interval=0)
    other = Engine(tiny_mtp, None, MAX_LEN, max_running=4, background=False)
    with pytest.raises(ValueError, match="expected an engine with count_routing=True"):
        other.take_routing_counts()
