"""Tests of low-rank updates: trained weights, frozen weights, and the size of the state."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dsv3_jax
from dsv3_jax import presets
from dsv3_jax.checkpoint.parameters import published_tensors
from dsv3_jax.initialization import abstract_model
from dsv3_jax.training.lora import is_updated
from dsv3_jax.training.losses import Losses
from dsv3_jax.training.state import TrainingState
from dsv3_jax.training.trainer import Trainer
from tests.support.checkpoints import random_tensors, write_checkpoint
from tests.support.oracle import Oracle, relative_error
from tests.support.running import forward
from tests.training.tiny import CONFIG, RUN, TOKENS, biases, evaluate, step, weighted

RANK, ALPHA = 2, 5.0
TUNING = dataclasses.replace(RUN, lora_rank=RANK, lora_alpha=ALPHA)
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
SHARED = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def tuner(model) -> Trainer:
    return Trainer(model, TUNING)


class Tuned(NamedTuple):
    """A state after 15 steps on one batch."""

    state: TrainingState
    losses: list[Losses]
    """Losses before each step, and after the last."""


@pytest.fixture(scope="module")
def tuned(tuner) -> Tuned:
    states, losses = [tuner.init()], []
    for _ in range(16):
        state, metrics = step(tuner, states[-1])
        states.append(state)
        losses.append(metrics.losses)
    return Tuned(states[15], losses)


def named(name: str) -> str:
    """Returns the published name of an updated weight of the tiny model."""
    return "model." + name.replace("mtp.0", "layers.1")


def test_names_of_the_updated_weights(tuner):
    want = {
        f"{layer}.{part}.{name}.weight"
        for layer in ("layers.0", "mtp.0")
        for part, names in (("self_attn", ATTENTION), ("mlp.shared_experts", SHARED))
        for name in names
    }
    assert tuner.init().params.keys() == want


def test_updates_of_published_models():
    """V2-Lite has no low-rank queries. The MLP of its first layer, which is dense, is not
    updated."""
    params = nnx.state(abstract_model(presets.DEEPSEEK_V2_LITE), nnx.Param)
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(params) if is_updated(path)}
    first = {name.removeprefix("layers.0.") for name in names if name.startswith("layers.0.")}
    attention = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    assert first == {f"self_attn.{name}.weight" for name in attention}
    assert len(names) == 27 * 4 + 26 * 3


@pytest.mark.slow
def test_tuning_begins_with_the_model(tuned, trainer):
    want = evaluate(trainer, trainer.init())
    assert weighted(tuned.losses[0]) == pytest.approx(weighted(want), rel=1e-6)


@pytest.mark.slow
def test_loss_goes_down(tuned):
    before, after = tuned.losses[0], tuned.losses[-1]
    assert float(after.main) < 0.8 * float(before.main)
    assert float(after.mtp) < 0.8 * float(before.mtp)


@pytest.mark.slow
def test_only_the_named_weights_change(model, tuner, tuned):
    """They change by ``alpha / r B A``, computed in float64."""
    before = published_tensors(model)
    after = published_tensors(tuner.model(tuned.state))
    updates = {named(name): update for name, update in tuned.state.params.items()}
    assert before.keys() == after.keys() > updates.keys()
    for name, weight in before.items():
        if name in updates:
            a, b = (np.asarray(factor, np.float64) for factor in updates[name])
            assert a.shape == (RANK, weight.shape[1])
            assert b.shape == (weight.shape[0], RANK)
            assert relative_error(after[name] - weight, ALPHA / RANK * b @ a) < 1e-5
            assert relative_error(after[name], weight) > 0.01
        else:
            np.testing.assert_array_equal(after[name], weight)
    for old, new in zip(biases(tuner.init()), biases(tuned.state), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.slow
def test_merged_logits_are_the_updated_weights(model, tuner, tuned, trainer):
    """Compares the merged model with the oracle, whose weights are ``W + alpha / r B A`` in
    float64. Its loss is the loss of the low-rank trainer."""
    tensors = {name: np.asarray(t, np.float64) for name, t in published_tensors(model).items()}
    for name, (a, b) in tuned.state.params.items():
        tensors[named(name)] += ALPHA / RANK * np.asarray(b, np.float64) @ np.asarray(a, np.float64)
    want = Oracle(CONFIG, tensors, latent_norm_eps=1e-6).forward(TOKENS)
    merged = tuner.model(tuned.state)
    logits, aux = forward(merged, TOKENS)
    assert relative_error(logits, want.logits) < 1e-5
    assert relative_error(aux.mtp_logits[0], want.mtp_logits[0]) < 1e-5
    whole = trainer.init()._replace(params=nnx.state(merged, nnx.Param))
    got = weighted(evaluate(trainer, whole))
    assert got == pytest.approx(weighted(tuned.losses[-1]), rel=1e-6)


@pytest.mark.slow
def test_model_is_not_modified(model, tuner):
    before = jax.tree.map(jnp.copy, nnx.state(model))
    state, _ = tuner.step(tuner.init(), jnp.asarray(TOKENS))
    tuner.step(state, jnp.asarray(TOKENS))
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(nnx.state(model)), strict=True)
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)


def test_state_is_small(model, tuner):
    """The state has r (in + out) numbers per updated weight three times: the updates and two
    moments."""
    updated = [
        weight
        for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param))
        if is_updated(path)
    ]
    numbers = sum(RANK * sum(weight.shape) for weight in updated)
    state = tuner.init()
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == numbers
    assert (
        sum(leaf.size for leaf in jax.tree.leaves(state.optimizer)) - 2 * numbers <= 2
    )  # step counters


@pytest.mark.slow
def test_weights_keep_the_dtype_of_the_model(tmp_path):
    write_checkpoint(tmp_path, CONFIG, random_tensors(CONFIG), dtype="bfloat16")
    loaded, _ = dsv3_jax.load(tmp_path, dtype=jnp.bfloat16)
    tuner = Trainer(loaded, TUNING)
    state = tuner.init()
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    merged = tuner.model(state)
    assert merged.dtype == jnp.bfloat16
    for one, other in zip(
        jax.tree.leaves(nnx.state(merged)), jax.tree.leaves(nnx.state(loaded)), strict=True
    ):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_rank_above_that_of_a_weight_is_refused(model):
    with pytest.raises(ValueError, match=r"lora_rank: expected at most 16, the rank of .* got 17$"):
        Trainer(model, dataclasses.replace(TUNING, lora_rank=17)).init()
