"""Fixtures of the engine's tests: a tiny random model with an MTP layer, and its Generator."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import dsv3_jax
from dsv3_jax.engine.device.programs import Buckets
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.offline.generator import Generator
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.support.shared_programs import shared_programs

MAX_LEN = 120

# Few programs: a step decodes only, or also has chunks.
BUCKETS = Buckets(decodes=(4,), chunks=(3,), chunk_tokens=16, max_steps=3)


@pytest.fixture(scope="package", autouse=True)
def _shared_programs():
    with shared_programs():
        yield


@pytest.fixture(scope="session")
def tiny_mtp(tmp_path_factory) -> DeepSeekV3:
    """Two layers, one with experts, and an MTP layer. Random weights write varied tokens."""
    directory = tmp_path_factory.mktemp("tiny_mtp")
    config = tiny_config(num_hidden_layers=2)
    write_checkpoint(directory, config, random_tensors(config))
    return dsv3_jax.load(directory)[0]


@pytest.fixture(scope="session")
def bfloat16_mtp(tmp_path_factory) -> DeepSeekV3:
    """The same model in bfloat16."""
    directory = tmp_path_factory.mktemp("bfloat16_mtp")
    config = tiny_config(num_hidden_layers=2)
    write_checkpoint(directory, config, random_tensors(config))
    return dsv3_jax.load(directory, dtype=jnp.bfloat16)[0]


@pytest.fixture(scope="session")
def alone(tiny_mtp) -> Generator:
    """Runs requests one batch at a time."""
    return Generator(tiny_mtp, None, MAX_LEN, batch_sizes=(8,), prefill_chunk=16)
