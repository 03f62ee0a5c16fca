"""Memory of a training step: what a program writes, its parts, and refusals."""

import dataclasses
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import abstract_model
from dsv3_jax.training import memory
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.liveness import peak
from dsv3_jax.training.memory import ACCURACY, alternatives, fitting, remedy, step_memory
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.training.trainer import Trainer
from tests.training.tiny import CONFIG, RUN

N = 256
SQUARE = 4 * N * N
BATCH, LENGTH = 8, 64
SETTINGS = RunSettings(batch=BATCH, length=LENGTH)


def peak_of(function, *shapes, dtype=jnp.float32):
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    program = jax.make_jaxpr(function)(*arrays)
    count = len(arrays)
    return peak(program, ["tokens"] * count, [1.0] * count, set()).nbytes


def test_elementwise_operations_between_matmuls_are_fused():
    """Two arrays at a time: the result of a matmul and what the next one reads."""

    def chain(x, w):
        for _ in range(3):
            x = jnp.exp(jnp.sin(x @ w) * 2) + 1
        return x.sum()

    assert peak_of(chain, (N, N), (N, N)) == 2 * SQUARE


def test_what_a_gradient_saves():
    """tanh saves its result, which the next matmul reads anyway."""

    def loss(x, w):
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return x.sum()

    saved = peak_of(jax.grad(loss), (N, N), (N, N))
    assert 3 * SQUARE <= saved <= 6 * SQUARE


def test_a_matmul_writes_the_rounded_result():
    def half(x, w):
        y = jnp.einsum("ij,jk", x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)
        return (y @ w).sum()

    assert peak_of(half, (N, N), (N, N), dtype=jnp.bfloat16) == SQUARE  # two of half the size


def test_the_body_of_a_loop_counts_once():
    def loop(x, w):
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ w) @ w, None), x, length=100)[0].sum()

    assert peak_of(loop, (N, N), (N, N)) <= 4 * SQUARE


def test_checkpointed_layers_save_only_their_inputs():
    def layer(x, w):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return x

    def loss(apply, x, w):
        for _ in range(8):
            x = apply(x, w)
        return x.sum()

    all_saved = peak_of(lambda x, w: jax.grad(loss, 1)(layer, x, w), (N, N), (N, N))
    inputs = peak_of(lambda x, w: jax.grad(loss, 1)(jax.checkpoint(layer), x, w), (N, N), (N, N))
    assert all_saved >= 32 * SQUARE
    assert inputs <= 18 * SQUARE


@pytest.fixture(scope="module")
def model():
    return abstract_model(ModelConfig.from_hf(CONFIG), dtype=jnp.float32)


@pytest.fixture(scope="module")
def memory_of(model):
    """Memory of a step by changes of the configuration, each computed once."""
    known = {}

    def compute(**changes):
        key = tuple(changes.items())
        if key not in known:
            trainer = Trainer(model, dataclasses.replace(RUN, **changes))
            known[key] = step_memory(trainer, BATCH, LENGTH)
        return known[key]

    return compute


def test_state_is_exact(model, memory_of):
    used = memory_of()
    weights = sum(
        math.prod(leaf.shape) for leaf in jax.tree.leaves(Trainer(model, RUN).abstract_state.params)
    )
    assert used.masters == 4 * weights
    assert 0 <= used.moments - 8 * weights < 100  # counters
    assert used.frozen == 0
    assert used.peak == sum(dataclasses.asdict(used).values())


@pytest.mark.slow
def test_settings_change_their_part(memory_of):
    plain = memory_of()
    assert plain.activations > 0 < plain.logits
    parts = memory_of(accumulate=4)
    assert parts.gradients >= plain.masters  # float32 sums of all gradients
    assert parts.activations < plain.activations
    assert memory_of(remat=memory.REMAT[-1]).peak < plain.peak
    low_rank = memory_of(lora_rank=2)
    assert low_rank.frozen == plain.masters
    assert low_rank.masters + low_rank.moments < plain.masters
    assert low_rank.activations > 0


def test_alternatives_recompute_least_first():
    config = dataclasses.replace(RUN, accumulate=2)
    settings = [(each.remat, each.accumulate) for each in alternatives(config, 8)]
    assert settings[:2] == [(memory.REMAT[0], 4), (memory.REMAT[0], 8)]
    assert settings[2:] == [(remat, n) for remat in memory.REMAT[1:] for n in (2, 4, 8)]


def make_trainer(config: TrainingConfig) -> Any:
    return types.SimpleNamespace(config=config, layout=None)


@pytest.fixture
def gigabytes(monkeypatch):
    """Sets the memory of a step by remat and accumulate, and the memory of the device, in GB."""

    def fix(sizes, available=None):
        def step_memory(trainer, batch, length):
            config = trainer.config
            activations = round(1e9 * sizes[config.recomputed, config.accumulate])
            return memory.TrainingMemory(0, 0, 0, 0, 0, activations, 0, 0)

        monkeypatch.setattr(memory, "step_memory", step_memory)
        monkeypatch.setattr(memory, "REMAT", (LEAST, MOST))
        limit = None if available is None else round(1e9 * available)
        monkeypatch.setattr(memory, "available_bytes", lambda: limit)

    return fix


PAIR = dataclasses.replace(SETTINGS, batch=2)
LEAST, MOST = memory.REMAT[0], memory.REMAT[-1]
FLAG = f"--remat {MOST}"
SIZES = {(LEAST, 1): 100.0, (LEAST, 2): 90.0, (MOST, 1): 50.0, (MOST, 2): 40.0}


def test_a_run_that_cannot_fit_is_refused(gigabytes):
    config = dataclasses.replace(RUN, remat=LEAST)
    for available in (None, 100.0, 96.0):  # the last is within the accuracy of the estimate
        gigabytes(SIZES, available)
        assert fitting(make_trainer, config, PAIR) == config
    gigabytes(SIZES, 60.0)
    with pytest.raises(ValueError, match="memory") as refusal:
        fitting(make_trainer, config, PAIR)
    assert str(refusal.value) == (
        "memory: expected a step of at most 60.0 GB per device, got 100.0 GB (activations 100.0);"
        f" {FLAG} needs 50.0 GB and fits; --no-check-memory tries it anyway"
    )


def test_a_policy_that_fits_is_chosen(gigabytes):
    assert RUN.remat == "auto"
    for available, chosen in [(None, LEAST), (100.0 * (1 + ACCURACY), LEAST), (104.0, MOST)]:
        gigabytes(SIZES, available)
        assert fitting(make_trainer, RUN, PAIR) == dataclasses.replace(RUN, remat=chosen)
    gigabytes(SIZES, 48.0)  # the last policy is refused only if it cannot fit
    assert fitting(make_trainer, RUN, PAIR).remat == MOST
    gigabytes(SIZES, 47.0)
    with pytest.raises(ValueError, match=r"got 50\.0 GB.*; --accumulate 2 needs 40\.0 GB and fits"):
        fitting(make_trainer, RUN, PAIR)


def test_a_remedy_recomputes_least_or_says_what_is_missing(gigabytes):
    gigabytes(SIZES)
    at = {gb: remedy(make_trainer, RUN, PAIR, round(1e9 * gb)) for gb in (95, 45, 30)}
    assert at[95] == "--accumulate 2 needs 90.0 GB and fits"
    assert at[45] == f"{FLAG} --accumulate 2 needs 40.0 GB and fits"
    assert at[30].startswith(f"nothing fits: {FLAG} --accumulate 2 still needs 10.0 GB too much;")
    alone = dataclasses.replace(PAIR, batch=1), dataclasses.replace(RUN, remat=MOST)
    smallest = remedy(make_trainer, alone[1], alone[0], 1)
    assert smallest.startswith("no other --remat or --accumulate needs less")
