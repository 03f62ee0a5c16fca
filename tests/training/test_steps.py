"""Tests of training steps: updates, accumulation, dtypes, donation and refused batches."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import dsv3_jax
from dsv3_jax.initialization import abstract_model
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training import optimizer
from dsv3_jax.training.trainer import Trainer
from sharding import make_layout
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.support.oracle import relative_error
from tests.support.unchanged import Snapshot
from tests.training.tiny import (
    CONFIG,
    RUN,
    TOKENS,
    arrays,
    biases,
    evaluate,
    gradients,
    step,
    weighted,
)


def test_loss_goes_down_on_a_repeated_batch(trainer):
    state = trainer.init()
    before = evaluate(trainer, state)
    for _ in range(20):
        state, _ = step(trainer, state)
    after = evaluate(trainer, state)
    assert int(state.step) == 20
    assert float(after.main) < 0.5 * float(before.main)
    assert float(after.mtp) < 0.5 * float(before.mtp)


def test_metrics_are_of_the_weights_before_the_step(trainer):
    start = trainer.init()
    _, metrics = step(trainer, start)
    assert weighted(metrics.losses) == pytest.approx(weighted(evaluate(trainer, start)), rel=1e-6)
    norm = np.sqrt(sum(np.sum(g**2) for g in arrays(gradients(trainer, start)).values()))
    assert float(metrics.gradient_norm) == pytest.approx(norm, rel=1e-5)


def test_adamw_by_hand(trainer):
    """Recomputes three steps from the gradients in the first moments. Vectors have no weight
    decay."""
    (b1, b2), eps = RUN.betas, 1e-8
    states = [trainer.init()]
    for _ in range(3):
        states.append(step(trainer, states[-1])[0])
    params = [arrays(state.params) for state in states]
    moments = [arrays(state.optimizer[1][0].mu) for state in states]
    for name, param in params[0].items():
        mean = np.zeros(param.shape)
        square = np.zeros(param.shape)
        param = param.astype(np.float64)
        for t in (1, 2, 3):
            gradient = (moments[t][name].astype(np.float64) - b1 * moments[t - 1][name]) / (1 - b1)
            mean = b1 * mean + (1 - b1) * gradient
            square = b2 * square + (1 - b2) * gradient**2
            moved = mean / (1 - b1**t) / (np.sqrt(square / (1 - b2**t)) + eps)
            decay = RUN.weight_decay * param if param.ndim > 1 else 0
            param = param - float(optimizer.learning_rate(RUN)(t - 1)) * (moved + decay)
        assert relative_error(params[3][name], param) < 1e-4, name


def test_equal_states_give_equal_steps(trainer):
    def three_steps():
        state = trainer.init()
        for _ in range(3):
            state, metrics = step(trainer, state)
        return jax.tree.leaves((state, metrics))

    for one, other in zip(three_steps(), three_steps(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_parameter_moves(trainer):
    """They move from the first step on."""
    start = trainer.init()
    first, _ = step(trainer, start)
    second, _ = step(trainer, first)
    for before, after in ((start, first), (first, second)):
        pairs = zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True)
        moved = [bool((a != b).any()) for a, b in pairs]
        assert all(moved)


def test_training_does_not_modify_the_initial_model(model, trainer):
    """Steps donate their state, so it must not share arrays with the model. Neither must the models
    that are made from a state."""
    before, trained = Snapshot(model), []
    for _ in range(2):
        state, _ = trainer.step(trainer.init(), jnp.asarray(TOKENS))
        trained += [trainer.model(state), trainer.model(state, copy=False)]
        before.check()
    for each in trained:
        each.lay_out(make_layout("single"))
        before.check()


def test_a_model_of_a_state_outlives_the_next_step(trainer):
    """The step deletes the state and a model that shares its arrays."""
    state = trainer.init()
    copied, shared = trainer.model(state), trainer.model(state, copy=False)
    before = [np.array(leaf) for leaf in jax.tree.leaves(nnx.state(copied))]
    trainer.step(state, jnp.asarray(TOKENS))
    for leaf, value in zip(jax.tree.leaves(nnx.state(copied)), before, strict=True):
        np.testing.assert_array_equal(leaf, value)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state(shared)))


# ---- accumulation --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thirds(model) -> Trainer:
    """A trainer with three microbatches, remat and scan."""
    return Trainer(model, dataclasses.replace(RUN, accumulate=3, remat=True, scan_layers=True))


def test_microbatches_have_unequal_numbers_of_targets():
    """The mean of the microbatches' means is therefore not the batch's mean."""
    targets = (TOKENS[:, 1:] != 0).sum(axis=1)
    assert [targets[i::3].sum() for i in range(3)] == [15, 21, 21]


@pytest.mark.slow
def test_accumulation_is_the_whole_batch(trainer, thirds):
    start = trainer.init()
    whole, parts = step(trainer, start), step(thirds, start)
    for one, other in zip(parts[1], whole[1], strict=True):
        for got, want in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert float(relative_error(got, want)) < 1e-6
    np.testing.assert_array_equal(parts[1].expert_load, whole[1].expert_load)
    for got, want in zip(biases(parts[0]), biases(whole[0]), strict=True):
        np.testing.assert_array_equal(got, want)
    got, want = (arrays(gradients(t, start)) for t in (thirds, trainer))
    assert {name: relative_error(got[name], want[name]) < 1e-5 for name in want} == dict.fromkeys(
        want, True
    )
    # The first step has a learning rate of 0.
    whole, parts = step(trainer, whole[0])[0], step(thirds, parts[0])[0]
    got, want = arrays(parts.params), arrays(whole.params)
    for name in want:
        assert relative_error(got[name], want[name]) < 1e-5, name
        assert relative_error(got[name], arrays(start.params)[name]) > 1e-3, name


@pytest.mark.slow
def test_accumulation_has_one_float32_copy(model):
    """The compiled step needs memory for one sum of gradients, and not for the gradients of a
    microbatch besides."""
    config = dataclasses.replace(model.config, hidden_size=256, moe_intermediate_size=256)
    wide = abstract_model(config)

    def temporary_bytes(accumulate: int) -> int:
        trainer = Trainer(wide, dataclasses.replace(RUN, accumulate=accumulate))
        tokens = jax.ShapeDtypeStruct((accumulate, 8), jnp.int32)
        lowered = trainer.programs.step.lower(trainer.abstract_state, None, tokens)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    size = sum(leaf.size for leaf in jax.tree.leaves(Trainer(wide, RUN).abstract_state.params))
    assert temporary_bytes(3) < temporary_bytes(1) + 1.2 * 4 * size


# ---- other models --------------------------------------------------------------------------------

SOFTMAX = {"topk_method": "greedy", "norm_topk_prob": False}
SOFTMAX |= {"n_group": 1, "topk_group": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "layers", "routers"),
    [
        (SOFTMAX | {"num_nextn_predict_layers": 2}, 3, 0),
        ({"first_k_dense_replace": 1, "num_nextn_predict_layers": 0}, 0, 0),
        ({"num_nextn_predict_layers": 3}, 4, 4),
    ],
    ids=["routers without biases", "no experts", "three MTP layers"],
)
def test_shapes_of_other_models(settings, layers, routers, model):
    config = dataclasses.replace(model.config, **settings)
    trainer = Trainer(DeepSeekV3(config, rngs=nnx.Rngs(0)), RUN)
    start = trainer.init()
    stepped, metrics = jax.eval_shape(trainer.step, start, jnp.asarray(TOKENS))
    assert metrics.expert_load.shape == (layers, 8)
    assert len(jax.tree.leaves(stepped.biases)) == routers
    assert jax.tree.structure(stepped) == jax.tree.structure(start)


# ---- dtypes and refusals -------------------------------------------------------------------------


@pytest.mark.slow
def test_bfloat16_computes_nearly_the_same(model, trainer):
    rounded = Trainer(model, dataclasses.replace(RUN, compute_dtype="bfloat16"))
    start = trainer.init()
    exact, losses = evaluate(trainer, start), evaluate(rounded, start)
    assert losses.main.dtype == jnp.float32
    assert float(losses.main) != float(exact.main)
    assert float(losses.main) == pytest.approx(float(exact.main), rel=0.02)


def test_master_weights_are_float32_whatever_was_loaded(tmp_path):
    write_checkpoint(tmp_path, CONFIG, random_tensors(CONFIG), dtype="bfloat16")
    loaded, _ = dsv3_jax.load(tmp_path, dtype=jnp.bfloat16)
    trainer = Trainer(loaded, RUN)
    state = trainer.init()
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    assert trainer.model(state).dtype == jnp.float32
    for param, loaded_weight in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(nnx.state(loaded, nnx.Param)), strict=True
    ):
        assert loaded_weight.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(param, np.asarray(loaded_weight, np.float32))


def test_float8_weights_do_not_train(tmp_path):
    """They can be frozen under low-rank updates: see test_lora.py."""
    config = tiny_config(num_hidden_layers=1, num_nextn_predict_layers=0)
    write_checkpoint(tmp_path, config, random_tensors(config), dtype="fp8")
    loaded, _ = dsv3_jax.load(tmp_path, quantization="fp8")
    with pytest.raises(ValueError, match="expected a model in bfloat16 or float32 to train, ") as e:
        Trainer(loaded, RUN)
    assert "got float8_e4m3fn in layers.0." in str(e.value)
    assert "\n" not in str(e.value)


def test_batches_that_do_not_fit_are_refused(model, trainer, thirds):
    with pytest.raises(
        ValueError, match="tokens: expected a batch size in multiples of accumulate=3, got 4"
    ):
        thirds.step(thirds.init(), jnp.asarray(TOKENS[:4]))
    short = jnp.asarray(TOKENS[:, :2])
    for call in (trainer.step, trainer.evaluate):
        with pytest.raises(
            ValueError, match="tokens: expected sequences of at least 3 tokens, got 2"
        ):
            call(trainer.init(), short)
