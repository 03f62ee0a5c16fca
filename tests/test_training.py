"""Training at a size where every number can be checked: gradients, balancing, losses, files."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import dsv3_jax
from dsv3_jax import ModelConfig
from dsv3_jax.checkpoint.parameters import published_tensors
from dsv3_jax.checkpoint.reader import CheckpointReader
from dsv3_jax.checkpoint.writer import write_checkpoint
from dsv3_jax.config import BlockQuantization
from dsv3_jax.layers.router import RouterBias
from dsv3_jax.model import Aux, DeepSeekV3
from dsv3_jax.training.balance import imbalance, update_bias
from dsv3_jax.training.losses import cross_entropy, losses
from dsv3_jax.training.step import Trainer, TrainingConfig, TrainingState
from tests.support.checkpoints import BIAS, is_fp8, random_tensors, tiny_config
from tests.support.checkpoints import write_checkpoint as write_published
from tests.support.oracle import dequantize, relative_error
from tests.support.running import forward

SPEED = 0.01
MTP_WEIGHT = 0.3
RUN = TrainingConfig(
    steps=24,
    learning_rate=0.02,
    final_learning_rate=0.002,
    warmup_steps=2,
    clip_norm=1e9,  # so that the optimiser's first moments are the gradients, times 1 - beta
    mtp_weight=MTP_WEIGHT,
    bias_update_speed=SPEED,
    compute_dtype="float32",
)
# Two documents a row, the second of which begins at a place of its own.
TOKENS = np.random.default_rng(1).integers(1, 32, (2, 12))
TOKENS[:, 0] = TOKENS[0, 5] = TOKENS[1, 8] = 0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> DeepSeekV3:
    """One MoE layer and one MTP layer."""
    directory = tmp_path_factory.mktemp("tiny")
    config = tiny_config(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        first_k_dense_replace=0,
        moe_intermediate_size=20,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    write_published(directory, config, random_tensors(config, seed=3))
    return dsv3_jax.load(directory, dtype=jnp.float32)[0]


@pytest.fixture(scope="module")
def trainer(model) -> Trainer:
    """Compiled: that takes longer than all of the tests."""
    made = Trainer(model, RUN)
    made.evaluate(made.init(), jnp.asarray(TOKENS))
    made.step(made.init(), jnp.asarray(TOKENS))
    return made


def total(trainer: Trainer, state: TrainingState) -> float:
    found = trainer.evaluate(state, jnp.asarray(TOKENS))
    return float(found.main) + MTP_WEIGHT * float(found.mtp)


def step(trainer: Trainer, state: TrainingState):
    """One step; `Trainer.step` takes its state for itself, so it is given a copy."""
    return trainer.step(jax.tree.map(jnp.copy, state), jnp.asarray(TOKENS))


def biases(state: TrainingState) -> list[np.ndarray]:
    """The main model's router, then the MTP layer's."""
    flat = dict(nnx.to_flat_state(state.biases))
    assert len(flat) == 2
    ends = ("mlp", "gate", BIAS)
    return [np.asarray(flat[part, 0, *ends].get_value()) for part in ("layers", "mtp")]


# ---- gradients -----------------------------------------------------------------------------------


def test_every_gradient_is_the_slope_of_the_loss(trainer):
    """Central differences, parameter by parameter.

    The direction goes along the gradient and three times as far at random, so that what a gradient
    lacks shows too. The distance is small enough for no token to change its experts on the way.
    """
    start = trainer.init()
    params = dict(nnx.to_flat_state(start.params))
    moments = dict(nnx.to_flat_state(step(trainer, start)[0].optimizer[1][0].mu))
    assert moments.keys() == params.keys()

    def loss(path: tuple, moved: np.ndarray) -> float:
        flat = params | {path: params[path].replace(jnp.asarray(moved, jnp.float32))}
        return total(trainer, start._replace(params=nnx.from_flat_state(flat.items())))

    errors = {}
    for path, param in params.items():
        gradient = np.asarray(moments[path].get_value(), np.float64) / (1 - RUN.betas[0])
        size = np.linalg.norm(gradient)
        random = np.random.default_rng(9).normal(size=gradient.shape)
        direction = gradient / size + 3 * random / np.linalg.norm(random)
        distance = 1e-3 / size
        ahead, behind = (param.get_value() + at * direction for at in (distance, -distance))
        slope = (loss(path, ahead) - loss(path, behind)) / (2 * distance)
        errors[".".join(map(str, path))] = abs(slope / np.sum(gradient * direction) - 1)
    assert len(errors) == 39
    assert {name: error for name, error in errors.items() if error > 0.005} == {}


# ---- balancing -----------------------------------------------------------------------------------


def test_update_of_the_bias_by_hand():
    """Loads 0 4 2 2, mean 2: the idle expert's bias rises, the busy one's falls."""
    old = jnp.array([0.5, 0.5, -0.25, 0.0])
    new = update_bias(old, jnp.array([0, 4, 2, 2]), 0.125)
    np.testing.assert_array_equal(new, [0.625, 0.375, -0.25, 0.0])


def test_imbalance_by_hand():
    """Largest over mean: 4 / 2 and 3 / 3."""
    assert float(imbalance(jnp.array([[0, 4, 2, 2], [3, 3, 3, 3]]))) == pytest.approx(1.5)


def test_step_moves_each_bias_by_the_loads_of_its_layer(trainer):
    start = trainer.init()
    _, aux = forward(trainer.model(start), TOKENS)
    loads = [np.asarray(stats.counts) for stats in aux.routing]
    np.testing.assert_array_equal(loads[0], aux.routing_counts[0])
    np.testing.assert_array_equal([load.sum() for load in loads], [2 * 12 * 3, 2 * 11 * 3])
    signs = [np.sign(load.mean() - load) for load in loads]
    assert (signs[0] != signs[1]).any(), "expected layers that can be told apart"

    stepped, metrics = step(trainer, start)
    for old, new, sign in zip(biases(start), biases(stepped), signs, strict=True):
        np.testing.assert_array_equal(new, old + np.float32(SPEED) * sign.astype(np.float32))
    want = np.mean([load.max() / load.mean() for load in loads])
    assert float(metrics.expert_imbalance) == pytest.approx(want)


def test_bias_has_no_gradient_and_no_optimiser(trainer):
    """As long as it changes no choice, it changes nothing: the weights are unbiased."""
    start = trainer.init()
    assert not any(BIAS in path for path, _ in nnx.to_flat_state(start.params))
    raised = jax.tree.map(lambda bias: bias + 0.5, start.biases)
    assert total(trainer, start._replace(biases=raised)) == total(trainer, start)
    assert len(jax.tree.leaves(nnx.state(trainer.model(start), RouterBias))) == 2


# ---- losses --------------------------------------------------------------------------------------


def logits_for(tokens: list[int], ahead: int, losses_at: list[float], vocabulary: int = 8):
    """[1, T, W] logits under which place i loses losses_at[i] nats on the token `ahead` of it.

    Of W logits, the target's is a and the others 0: its probability is e^a / (e^a + W - 1).
    """
    logits = np.zeros((1, len(losses_at), vocabulary), np.float32)
    for place, loss in enumerate(losses_at):
        if place + ahead < len(tokens):
            p = math.exp(-loss)
            logits[0, place, tokens[place + ahead]] = math.log(p * (vocabulary - 1) / (1 - p))
    return jnp.asarray(logits)


def test_cross_entropy_counts_what_it_is_told_to():
    logits = logits_for([0, 3, 5, 1], 1, [0.5, 2.0, 4.0])
    targets = jnp.array([[3, 5, 1]])
    for counted, want in (([1, 1, 1], 6.5 / 3), ([1, 0, 1], 2.25), ([0, 0, 0], 0.0)):
        got = cross_entropy(logits, targets, jnp.array([counted], bool))
        assert float(got) == pytest.approx(want, rel=1e-5)


# BOS is 0: documents 0 5 6 7, 0 3 and 0 4 2 begin at places 0, 4 and 6.
PACKED = [0, 5, 6, 7, 0, 3, 0, 4, 2]
POWERS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]  # a sum tells its terms
LOSSES = [power / 64 for power in POWERS]


run_losses = jax.jit(losses, static_argnums=3)


def aux_of(*mtp_logits: jax.Array) -> Aux:
    return Aux(jnp.zeros((1, 4), jnp.int32), mtp_logits, ())


def test_no_place_is_counted_that_predicts_the_begin_of_a_document():
    """Places 3 and 5 would; 8 has nothing to predict."""
    found = run_losses(logits_for(PACKED, 1, LOSSES), aux_of(), jnp.array([PACKED]), 0)
    want = (1 + 2 + 4 + 16 + 64 + 128) / 64 / 6
    assert float(found.main) == pytest.approx(want, rel=1e-5)
    assert float(found.mtp) == 0


def test_mtp_places_that_cross_a_document_are_not_counted():
    """Layer k at place i reads token i+1+k and predicts i+2+k: none of i+1 .. i+2+k may be BOS.

    Layer 0 keeps 0 (5 6), 1 (6 7) and 6 (4 2); layer 1 keeps 0 (5 6 7) alone.
    """
    main = logits_for(PACKED, 1, LOSSES)
    first = logits_for(PACKED, 2, LOSSES[:8])
    second = logits_for(PACKED, 3, LOSSES[:7])
    tokens = jnp.array([PACKED])
    found = run_losses(main, aux_of(first), tokens, 0)
    assert float(found.mtp) == pytest.approx((1 + 2 + 64) / 64 / 3, rel=1e-5)
    found = run_losses(main, aux_of(first, second), tokens, 0)
    assert float(found.mtp) == pytest.approx(((1 + 2 + 64) / 64 / 3 + 1 / 64) / 2, rel=1e-5)


def test_agreement_of_the_first_mtp_layer():
    """Of its places 0, 1 and 6, the best tokens are those of the main model at 1, 2 and 7."""
    main = jax.nn.one_hot(jnp.array([[0, 3, 4, 0, 0, 0, 0, 5, 0]]), 8)
    first = jax.nn.one_hot(jnp.array([[3, 1, 0, 0, 0, 0, 5, 0]]), 8)
    found = run_losses(main, aux_of(first), jnp.array([PACKED]), 0)
    assert float(found.mtp_agreement) == pytest.approx(2 / 3)


def test_losses_of_the_model_are_those_of_its_logits(trainer):
    """Through `evaluate`, against log-probabilities in float64."""
    start = trainer.init()
    logits, aux = forward(trainer.model(start), TOKENS)
    found = trainer.evaluate(start, jnp.asarray(TOKENS))
    for got, array, ahead in ((found.main, logits, 1), (found.mtp, aux.mtp_logits[0], 2)):
        terms = []
        for row, scores in zip(TOKENS, np.asarray(array, np.float64), strict=True):
            for place in range(len(row) - ahead):
                if 0 not in row[place + 1 : place + 1 + ahead]:
                    odds = np.exp(scores[place])
                    terms.append(-np.log(odds[row[place + ahead]] / odds.sum()))
        assert len(terms) == {1: 20, 2: 16}[ahead]
        assert float(got) == pytest.approx(np.mean(terms), rel=1e-5)


# ---- steps ---------------------------------------------------------------------------------------


def test_loss_goes_down_on_a_repeated_batch(trainer):
    state = trainer.init()
    before = trainer.evaluate(state, jnp.asarray(TOKENS))
    for _ in range(20):
        state, _ = step(trainer, state)
    after = trainer.evaluate(state, jnp.asarray(TOKENS))
    assert int(state.step) == 20
    assert float(after.main) < 0.5 * float(before.main)
    assert float(after.mtp) < 0.5 * float(before.mtp)


def test_equal_states_give_equal_steps(trainer):
    def three_steps():
        state = trainer.init()
        for _ in range(3):
            state, metrics = step(trainer, state)
        return jax.tree.leaves((state, metrics))

    for one, other in zip(three_steps(), three_steps(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_every_parameter_moves(trainer):
    """From the second step on: the warm-up begins at a learning rate of 0."""
    start = trainer.init()
    first, _ = step(trainer, start)
    second, _ = step(trainer, first)
    for before, after in ((start, first), (first, second)):
        pairs = zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True)
        moved = [bool((a != b).any()) for a, b in pairs]
        assert moved == [before is first] * len(moved)


def test_training_leaves_the_model_it_began_from_alone(model, trainer):
    """Steps donate their state, which must not be the model's own arrays."""
    before = jax.tree.map(jnp.copy, nnx.state(model))
    for _ in range(2):
        trainer.step(trainer.init(), jnp.asarray(TOKENS))
    after = nnx.state(model)
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(one, other)


# ---- what a run leaves on disk -------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> DeepSeekV3:
    """float32 weights, with dense, MoE and MTP layers."""
    directory = tmp_path_factory.mktemp("trained")
    config = tiny_config(num_hidden_layers=2, num_nextn_predict_layers=2)
    write_published(directory, config, random_tensors(config))
    return dsv3_jax.load(directory, dtype=jnp.float32)[0]


def bits(directory: Path) -> dict[str, tuple[np.dtype, tuple[int, ...], bytes]]:
    return {n: (t.dtype, t.shape, t.tobytes()) for n, t in CheckpointReader(directory).items()}


def test_bfloat16_round_trip(trained, tmp_path):
    write_checkpoint(trained, tmp_path / "one", shard_bytes=100_000)
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 1
    assert ModelConfig.from_hf(tmp_path / "one") == dataclasses.replace(
        trained.config, dtype="bfloat16"
    )
    loaded, _ = dsv3_jax.load(tmp_path / "one", dtype=jnp.bfloat16)
    held = published_tensors(loaded)
    originals = published_tensors(trained)
    assert held.keys() == originals.keys()
    for name, original in originals.items():
        dtype = np.float32 if name.endswith(BIAS) else ml_dtypes.bfloat16
        assert held[name].dtype == dtype
        np.testing.assert_array_equal(held[name], original.astype(dtype))
    write_checkpoint(loaded, tmp_path / "two")
    assert bits(tmp_path / "two") == bits(tmp_path / "one")


@pytest.mark.parametrize(
    "quantization",
    [BlockQuantization(), BlockQuantization((24, 40), "ue8m0")],
    ids=["published block", "small block, ue8m0"],
)
def test_float8_round_trip(quantization, trained, tmp_path):
    write_checkpoint(trained, tmp_path / "one", quantization=quantization)
    kept, _ = dsv3_jax.load(tmp_path / "one", quantization="fp8")
    assert kept.config.quantization == quantization
    write_checkpoint(kept, tmp_path / "two", quantization=quantization)
    assert bits(tmp_path / "two") == bits(tmp_path / "one")

    stored = CheckpointReader(tmp_path / "one")
    cast = published_tensors(dsv3_jax.load(tmp_path / "one", dtype=jnp.float32)[0])
    for name, original in published_tensors(trained).items():
        if not is_fp8(name):
            assert f"{name}_scale_inv" not in stored
            continue
        assert stored[name].dtype == ml_dtypes.float8_e4m3fn
        scale = stored[f"{name}_scale_inv"]
        values = dequantize(stored[name], scale, quantization.weight_block_size)
        np.testing.assert_array_equal(cast[name], values.astype(np.float32))
        # e4m3 keeps three bits behind the leading one: at most 1/16 off, 2.7 % over many.
        assert relative_error(values, original) < 0.04
