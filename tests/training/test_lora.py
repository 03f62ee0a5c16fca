"""Tests of low-rank updates: their gradients, trained and frozen weights, the size of the state."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

import dsv3_jax
from dsv3_jax import ModelConfig, presets
from dsv3_jax.checkpoint.parameters import published_tensors
from dsv3_jax.initialization import abstract_model
from dsv3_jax.layers.linear import Linear, Weight
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import QUANTIZATIONS
from dsv3_jax.training.lora import LowRank, UpdatedLinear, is_updated
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


# ---- frozen weights as they are stored -----------------------------------------------------------


def base(name: str, **changes) -> DeepSeekV3:
    """Returns a random model in bfloat16 whose matrices have the format ``name``."""
    quantization = QUANTIZATIONS[name]
    return DeepSeekV3(
        ModelConfig.from_hf(CONFIG | changes),
        rngs=nnx.Rngs(0),
        dtype=jnp.bfloat16,
        quantization=quantization,
    )


def in_float32(model: DeepSeekV3) -> DeepSeekV3:
    """Returns a model with the same weights in float32, none of them quantised."""
    copy = nnx.clone(model)
    for _, module in nnx.iter_modules(copy):
        if isinstance(module, Weight) and module.quantization is not None:
            module.replace_weight(module.dense(jnp.float32))
    graph, weights, rest = nnx.split(copy, nnx.Param, ...)
    return nnx.merge(graph, jax.tree.map(lambda w: w.astype(jnp.float32), weights), rest)


def gradient(trainer: Trainer, params, model: DeepSeekV3):
    """Returns the gradient by ``params``, and the losses."""
    arguments = nnx.state(model, nnx.Not(nnx.Param)), jnp.asarray(TOKENS), jnp.float32(0.3)
    return jax.jit(trainer._objective.gradient)(params, trainer._frozen, *arguments)[:2]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_gradients_are_those_of_merged_weights(name):
    """With the gradient G of a merged dense weight ``W + f B A`` in float32, those of the factors
    are ``f B^T G`` and ``f G A^T``."""
    model, random = base(name), np.random.default_rng(0)
    tuner = Trainer(model, TUNING)
    params = jax.tree.map(
        lambda p: p + 0.1 * random.normal(size=p.shape).astype("f4"), tuner.init().params
    )
    got, losses = gradient(tuner, params, model)
    dense = in_float32(model)
    weights = nnx.state(dense, nnx.Param)
    for path, weight in nnx.to_flat_state(weights):
        if is_updated(path):
            a, b = params[".".join(map(str, path))]
            weight.set_value(weight.get_value() + ALPHA / RANK * jnp.dot(b, a, precision="highest"))
    of_weights, want = gradient(Trainer(dense, RUN), weights, dense)
    assert weighted(losses) == pytest.approx(weighted(want), rel=1e-6)
    flat = {".".join(map(str, path)): g for path, g in nnx.to_flat_state(of_weights)}
    for weight, (d_a, d_b) in got.items():
        g = np.asarray(flat[weight].get_value(), np.float64)
        a, b = (np.asarray(factor, np.float64) for factor in params[weight])
        assert relative_error(d_a, ALPHA / RANK * b.T @ g) < 1e-5, weight
        assert relative_error(d_b, ALPHA / RANK * g @ a.T) < 1e-5, weight
        assert np.linalg.norm(d_a) > 0 < np.linalg.norm(d_b)


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_frozen_matrices_have_no_gradient(name):
    """No matmul of a step has the shape of an updated matrix, as its gradient would, or the product
    ``B A``."""
    # The matmul of experts on CPUs has blocks of 32 rows, so no updated matrix has.
    trainer = Trainer(base(name, num_attention_heads=3, num_key_value_heads=3), TUNING)
    arguments = trainer.step_shapes(*TOKENS.shape)
    program = jax.make_jaxpr(trainer.programs.step)(*arguments).jaxpr
    program, _ = dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)
    shapes = {w.shape for path, w in nnx.to_flat_state(trainer._frozen) if is_updated(path)}
    products = set(matmuls(program))
    assert products
    assert not products & (shapes | {shape[::-1] for shape in shapes})


def matmuls(jaxpr):
    """Yields the shape of every matmul's result."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "ragged_dot_general"):
            yield equation.outvars[0].aval.shape
        for inner in core.jaxprs_in_params(equation.params):
            yield from matmuls(inner)


def test_updates_are_not_rounded_to_the_weights():
    """A change of a bfloat16 weight by a thousandth of its last bit changes the result by as
    much as it does in float32."""
    linear = Linear(16, 8, std=0.02, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    random = np.random.default_rng(0)
    a, b = (random.normal(size=shape).astype("f4") for shape in ((2, 16), (8, 2)))
    x = jnp.asarray(random.normal(size=(5, 16)), jnp.bfloat16)
    updated = UpdatedLinear(linear, LowRank(jnp.asarray(a), jnp.asarray(1e-7 * b)), 2.0)
    change = updated(x, jnp.float32) - linear(x, jnp.float32)
    assert relative_error(1e7 * change, 2 * np.asarray(x, np.float64) @ (b @ a).T) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_model_of_a_quantised_base_is_dequantised(name):
    """The model keeps its dtype, in which updates have more bits. The base does not change."""
    model = base(name)
    before = nnx.state(nnx.clone(model))
    tuner = Trainer(model, TUNING)
    params = jax.tree.map(lambda p: p + 0.1, tuner.init().params)
    state = tuner.init()._replace(params=params)
    merged = tuner.model(state)
    assert merged.dtype == jnp.bfloat16
    want = published_tensors(in_float32(model))
    updates = {named(path): update for path, update in params.items()}
    got = published_tensors(merged)
    assert got.keys() == want.keys()
    for path, weight in want.items():
        assert got[path].dtype == (np.float32 if path.endswith("bias") else jnp.bfloat16)
        if path in updates:
            weight = weight + ALPHA / RANK * np.asarray(updates[path].b) @ updates[path].a
        assert relative_error(got[path].astype("f4"), weight) < 2**-8, path
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(nnx.state(model)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_quantised_weights_are_not_trained(model):
    message = "expected a model in bfloat16 or float32 to train, got float8_e4m3fn .*; load it"
    with pytest.raises(ValueError, match=message):
        Trainer(base("fp8"), RUN)
    activations = base("fp8")
    activations.use_float8_activations()
    with pytest.raises(ValueError, match="activations: expected None for training, got float8"):
        Trainer(activations, TUNING)
