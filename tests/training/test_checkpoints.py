"""Tests of checkpoints: exact restoring, removal of old ones, and interrupted saves."""

import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.training.checkpoints import CheckpointStore
from dsv3_jax.training.state import TrainingState
from dsv3_jax.training.trainer import Trainer
from tests.training.tiny import RUN, arrays


@pytest.fixture(scope="module")
def state(model):
    return Trainer(model, RUN).init()


def with_step(state, step: int):
    return state._replace(step=jnp.int32(step))


def test_round_trip(state, tmp_path):
    noise = np.random.default_rng(0)
    filled = jax.tree.map(lambda a: jnp.asarray(noise.normal(size=a.shape), a.dtype), state)
    store = CheckpointStore(tmp_path, 2)
    store.save(with_step(filled, 7), {"next_index": 7})
    restored, batches = CheckpointStore(tmp_path, 2).restore(7, jax.eval_shape(lambda: filled))
    assert batches == {"next_index": 7}
    assert jax.tree.structure(restored) == jax.tree.structure(filled)
    want = arrays(with_step(filled, 7))
    for name, got in arrays(restored).items():
        assert got.dtype == want[name].dtype
        np.testing.assert_array_equal(got, want[name])


def test_empty_fields_are_not_restored(state, tmp_path):
    store = CheckpointStore(tmp_path, 2)
    store.save(with_step(state, 1), {})
    restored, _ = store.restore(1, jax.eval_shape(lambda: state)._replace(optimizer=()))
    assert restored.optimizer == ()
    np.testing.assert_array_equal(
        jax.tree.leaves(restored.params)[0], jax.tree.leaves(state.params)[0]
    )


def test_a_model_without_biases(state, tmp_path):
    bare = with_step(state._replace(biases={}), 3)
    store = CheckpointStore(tmp_path, 1)
    store.save(bare, {})
    restored, _ = store.restore(3, jax.eval_shape(lambda: bare))
    assert restored.biases == {}


def test_the_last_checkpoints_are_kept(state, tmp_path):
    store = CheckpointStore(tmp_path, 2)
    for step in (2, 4, 6, 8):
        store.save(with_step(state, step), {"next_index": step})
    assert store.steps() == [6, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "8"]
    assert CheckpointStore(tmp_path, None).steps() == [6, 8]


SAVES_AND_DIES = """
import os, signal, sys
from pathlib import Path
import jax.numpy as jnp
from dsv3_jax.training.state import TrainingState
from dsv3_jax.training.checkpoints import CheckpointStore

class Deadly(dict):
    def items(self):
        os.kill(os.getpid(), signal.SIGKILL)

store = CheckpointStore(Path(sys.argv[1]), 2)
state = TrainingState({"w": jnp.ones(3)}, {}, {"m": jnp.ones(3)}, jnp.int32(1))
store.save(state, {"next_index": 1})
store.save(state._replace(step=jnp.int32(2)), Deadly(next_index=2))
"""


@pytest.mark.slow
def test_an_interrupted_save_leaves_no_checkpoint(tmp_path):
    """The process is killed before it writes the state of the batches, after some of its arrays."""
    died = subprocess.run([sys.executable, "-c", SAVES_AND_DIES, tmp_path], check=False)
    assert died.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2, "expected the second save to have begun"
    example = TrainingState({"w": jnp.ones(3)}, {}, {"m": jnp.ones(3)}, jnp.int32(0))
    store = CheckpointStore(tmp_path, 2)
    assert store.steps() == [1]
    assert store.restore(1, jax.eval_shape(lambda: example))[1] == {"next_index": 1}
    store.save(with_step(example, 2), {"next_index": 2})
    assert store.steps() == [1, 2]
    assert store.restore(2, jax.eval_shape(lambda: example))[1] == {"next_index": 2}
