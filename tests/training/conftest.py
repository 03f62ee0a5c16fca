"""One tiny model and one compiled trainer, shared by all training tests."""

import jax.numpy as jnp
import pytest

import dsv3_jax
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training.trainer import Trainer
from tests.support.checkpoints import random_tensors, write_checkpoint
from tests.training.tiny import CONFIG, RUN, evaluate, step


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> DeepSeekV3:
    directory = tmp_path_factory.mktemp("tiny")
    write_checkpoint(directory, CONFIG, random_tensors(CONFIG, seed=3))
    return dsv3_jax.load(directory, dtype=jnp.float32)[0]


@pytest.fixture(scope="session")
def trainer(model) -> Trainer:
    """A trainer with compiled programs, because compiling takes longer than all of the tests."""
    made = Trainer(model, RUN)
    evaluate(made, made.init())
    step(made, made.init())
    return made
