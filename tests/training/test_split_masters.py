"""Tests of float32 masters that are stored as a bfloat16 rounding and 16 more bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import random_model
from dsv3_jax.training.checkpoints import CheckpointStore
from dsv3_jax.training.objective import stays_float32
from dsv3_jax.training.state import TrainingState, joined, split
from dsv3_jax.training.trainer import Trainer
from tests.training.tiny import CONFIG, RUN, TOKENS

MODEL = ModelConfig.from_hf(CONFIG)

HALF = dataclasses.replace(RUN, compute_dtype="bfloat16")


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(random_model(MODEL, 0), HALF)


@pytest.fixture(scope="module")
def states(trainer) -> list[TrainingState]:
    """The states before and after one step."""
    state = trainer.init()
    before = jax.tree.map(jnp.copy, state)
    return [before, trainer.step(state, jnp.asarray(TOKENS))[0]]


def of_one_matrix(values: np.ndarray) -> TrainingState:
    params = nnx.State({"lm_head": {"weight": nnx.Param(jnp.asarray(values)[None])}})
    return TrainingState(params, {}, (), jnp.int32(0))


def matrix(tree) -> np.ndarray:
    return np.asarray(tree["lm_head"]["weight"][...])[0]


def test_every_bit_returns():
    random = np.random.default_rng(0)
    bits = random.integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32)
    edges = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x7F7FFFFF, 0x7F800000, 0x7FC00000])
    edges = np.concatenate([edges, edges | 0x80000000]).astype(np.uint32)
    values = np.concatenate([bits, edges]).view(np.float32)
    state = of_one_matrix(values)
    halves = split(state)
    assert matrix(halves.params).dtype == jnp.bfloat16
    assert matrix(halves.low_bits).dtype == jnp.int16
    np.testing.assert_array_equal(
        matrix(joined(halves).params).view(np.uint32), values.view(np.uint32)
    )
    # Not numbers, and what is halfway, have another rounding to even.
    other = np.isnan(values) | (values.view(np.uint32) & 0xFFFF == 0x8000)
    nearest = np.asarray(jnp.asarray(values).astype(jnp.bfloat16))
    np.testing.assert_array_equal(matrix(halves.params)[~other], nearest[~other])
    halfway = of_one_matrix(np.array([0x3F808000, 0xBF808000], np.uint32).view(np.float32))
    assert matrix(split(halfway).params).tolist() == [1.0078125, -1.0078125]


def test_which_parameters_are_split(states):
    for state in states:
        params, low = (dict(nnx.to_flat_state(tree)) for tree in (state.params, state.low_bits))
        for path, leaf in params.items():
            is_split = not stays_float32(path, leaf.ndim)
            assert leaf.dtype == (jnp.bfloat16 if is_split else jnp.float32)
            assert (path in low) == is_split
        assert 0 < len(low) < len(params)
    for changes in ({"compute_dtype": "float32"}, {"lora_rank": 2}):
        config = dataclasses.replace(HALF, **changes)
        assert Trainer(random_model(MODEL, 0), config).init().low_bits is None


def test_a_step_is_that_of_float32_masters(trainer, states):
    """No initial weight is halfway between two bfloat16 numbers."""
    whole, metrics = trainer.step(joined(jax.tree.map(jnp.copy, states[0])), jnp.asarray(TOKENS))
    assert whole.low_bits is None
    want, got = jax.tree.leaves(whole), jax.tree.leaves(joined(states[1]))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)  # compilers may fuse differently
    small = [np.abs(leaf[...]).max() for _, leaf in nnx.to_flat_state(states[1].low_bits)]
    assert min(small) > 1000  # the update is more than the rounding
    assert np.isfinite(metrics.gradient_norm)


def test_accumulated_gradients_are_float32(trainer, states):
    """A sum in bfloat16 would have an error of 1/256 in each of three additions."""
    objective = dataclasses.replace(
        trainer._objective, config=dataclasses.replace(HALF, accumulate=3)
    )
    weight = jnp.float32(0.3)
    arguments = states[0].params, None, states[0].biases, jnp.asarray(TOKENS), weight
    sums, *_ = jax.jit(objective.gradient)(*arguments)
    assert {leaf.dtype for leaf in jax.tree.leaves(sums)} == {jnp.dtype(jnp.float32)}


def test_a_checkpoint_has_float32_and_returns_the_halves(trainer, states, tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=None)
    store.save(states[1], {})
    restored, _ = store.restore(1, trainer.abstract_state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(states[1]), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    # A run of an earlier version has the same file.
    whole, _ = store.restore(1, joined_shapes(trainer))
    np.testing.assert_array_equal(
        jax.tree.leaves(whole.params)[0], jax.tree.leaves(joined(states[1]).params)[0]
    )
    store.close()


def joined_shapes(trainer: Trainer) -> TrainingState:
    return jax.eval_shape(joined, trainer.abstract_state)


def test_the_trained_model_is_float32(trainer, states):
    model = trainer.model(states[1])
    want = dict(nnx.to_flat_state(joined(states[1]).params))
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(leaf[...], want[path][...])
