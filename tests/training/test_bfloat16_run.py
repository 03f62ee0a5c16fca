"""Tests that a run in bfloat16 has the losses of float32, and the same ones when it is repeated."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.initialization import random_model
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.trainer import Trainer

STEPS, BATCH, LENGTH = 200, 6, 48
ROOT = Path(dsv3_jax.__file__).parent
# In nats. Measured on 2026-11-29: 0.018 in a step, 0.004 on average without sign, 0.0005 with.
STEP_BOUND, AVERAGE_BOUND, MEAN_BOUND = 0.06, 0.012, 0.003


def batches() -> np.ndarray:
    """Returns batches of a random language: one of four tokens follows each of 512."""
    random = np.random.default_rng(0)
    followers = random.integers(1, 513, (513, 4))
    tokens = np.zeros((STEPS * BATCH, LENGTH), np.int32)  # they begin with BOS
    tokens[:, 1] = random.integers(1, 513, len(tokens))
    for position in range(2, LENGTH):
        choice = random.integers(0, 4, len(tokens))
        tokens[:, position] = followers[tokens[:, position - 1], choice]
    return tokens.reshape(STEPS, BATCH, LENGTH)


def losses(dtype: str, steps: int = STEPS) -> np.ndarray:
    """Returns the losses of the first steps, of a model with the demo's widths and three of its
    layers."""
    config = dsv3_jax.ModelConfig.from_hf(ROOT / "demo")
    config = dataclasses.replace(config, num_hidden_layers=2, quantization=None)
    settings = TrainingConfig(
        steps=STEPS,
        learning_rate=5e-4,
        final_learning_rate=5e-5,
        warmup_steps=20,
        compute_dtype=dtype,
        remat="norms",
    )
    trainer = Trainer(random_model(config, 0), settings)
    state, values = trainer.init(), []
    for tokens in batches()[:steps]:
        state, metrics = trainer.step(state, jnp.asarray(tokens))
        values.append(metrics.losses.main)
    return np.array(values, np.float64)


@pytest.fixture(scope="module")
def rounded() -> np.ndarray:
    return losses("bfloat16")


@pytest.mark.slow
def test_losses_of_200_steps(rounded):
    want = losses("float32")
    assert want[-20:].mean() < want[0] - 1.5
    difference = rounded - want
    assert np.abs(difference).max() < STEP_BOUND
    assert np.abs(difference).mean() < AVERAGE_BOUND
    assert abs(difference.mean()) < MEAN_BOUND


@pytest.mark.slow
def test_a_repeated_run_has_the_same_losses(rounded):
    np.testing.assert_array_equal(losses("bfloat16", 40), rounded[:40])
