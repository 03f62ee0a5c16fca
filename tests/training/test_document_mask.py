"""Training with a document mask: packed documents have the losses of separate ones."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import abstract_model, random_model
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.corpus import EndToken
from dsv3_jax.training.losses import first_keys
from dsv3_jax.training.trainer import Trainer
from pallas_kernels.mla_prefill import blocked
from sharding import make_layout
from tests.support.checkpoints import sparse_config, tiny_config
from tests.support.oracle import relative_error
from tests.training.tiny import RUN, arrays

# All experts take all tokens: otherwise one that bfloat16 sends to another expert would change
# gradients by more than rounding.
CONFIG = ModelConfig.from_hf(
    tiny_config(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        n_routed_experts=4,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
    )
)
SEQUENCES = ((3, 1, 1, 9, 10), (24,), (14, 8, 2), (2, 2, 19, 1))  # lengths of the documents
LENGTH = sum(SEQUENCES[0])
MASKED = dataclasses.replace(RUN, document_mask=True, balance_weight=0.0)


@functools.cache
def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = [length for lengths in SEQUENCES for length in lengths]
    return [np.concatenate([[0], rng.integers(1, 32, length - 1)]) for length in lengths]


def packed() -> np.ndarray:
    return np.concatenate(documents()).reshape(len(SEQUENCES), LENGTH)


def separate() -> np.ndarray:
    """Every document in a sequence of its own. The tokens after it have no targets."""
    return np.stack([np.pad(each, (0, LENGTH - len(each))) for each in documents()])


def outcome(tokens: np.ndarray, config: TrainingConfig, layout: Any = None) -> dict[str, Any]:
    """Returns the losses of a batch, and the gradient of each parameter by path."""
    trainer = Trainer(random_model(CONFIG, 0, layout), config)
    state = trainer.init()
    gradient = jax.jit(trainer._objective.gradient)
    grads, losses, _ = gradient(
        state.params,
        trainer._frozen,
        state.biases,
        trainer.shard_batch(tokens),
        jnp.float32(config.mtp_weight),
    )
    return {"losses": losses, "gradients": arrays(grads)}


@functools.cache
def expected(**settings: Any) -> dict[str, Any]:
    """The outcome of separate documents in float32, without a mask."""
    return outcome(separate(), dataclasses.replace(RUN, balance_weight=0.0, **settings))


@pytest.fixture
def short_blocks(monkeypatch):
    """Blocks of 8 queries and keys."""
    monkeypatch.setattr(blocked, "LONGEST_BLOCK", 8)
    monkeypatch.setattr(blocked, "SHORTEST_BLOCK", 8)


def compare(got: dict[str, Any], want: dict[str, Any], bound: float) -> None:
    for name in ("main", "mtp", "mtp_agreement", "drafts"):
        of_packed, of_separate = (float(getattr(each["losses"], name)) for each in (got, want))
        # The divergence of drafts is a small difference of large logarithms.
        assert of_packed == pytest.approx(of_separate, rel=bound, abs=1e-7), name
    assert got["gradients"].keys() == want["gradients"].keys()
    for path, gradient in want["gradients"].items():
        assert relative_error(got["gradients"][path], gradient) < bound, path


@pytest.mark.usefixtures("short_blocks")
def test_packed_documents_are_separate_ones():
    """Main model and MTP layer, losses and all gradients, in float32."""
    assert float(expected()["losses"].mtp) > 1
    compare(outcome(packed(), MASKED), expected(), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate": 2, "remat": "full", "scan_layers": True},
        {"accumulate": 4, "remat": "attention+norms"},
        {"remat": "norms", "qk_clip": 100.0},
        {"draft_depth": 3},
        {"lora_rank": 2},
    ],
    ids=["scan", "microbatches", "QK-clip", "drafts", "LoRA"],
)
def test_other_settings(settings):
    same = {name: settings[name] for name in ("draft_depth", "lora_rank") if name in settings}
    got = outcome(packed(), dataclasses.replace(MASKED, **settings))
    compare(got, expected(**same), 2e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("context_devices", [None, 2])
def test_on_a_mesh(context_devices):
    sizes = {"expert_devices": 2, "context_devices": context_devices}
    layout = make_layout("train", devices=jax.devices()[:4], **sizes)
    compare(outcome(packed(), MASKED, layout), expected(), 5e-6)


def test_bfloat16():
    """Each array's gradient is near that of separate documents in float32."""
    got = outcome(packed(), dataclasses.replace(MASKED, compute_dtype="bfloat16"))
    want = expected()
    assert float(got["losses"].main) == pytest.approx(float(want["losses"].main), rel=2e-3)
    assert float(got["losses"].mtp) == pytest.approx(float(want["losses"].mtp), rel=2e-3)
    for path, gradient in want["gradients"].items():
        assert relative_error(got["gradients"][path], gradient) < 0.02, path


def test_the_default_has_no_mask():
    """Its program does not even compute where documents begin."""
    tokens = jax.ShapeDtypeStruct(packed().shape, jnp.int32)
    for config, has_mask in ((RUN, False), (MASKED, True)):
        trainer = Trainer(abstract_model(CONFIG, dtype=jnp.float32), config)
        traced = trainer.programs.step.trace(trainer.abstract_state, None, tokens)
        assert ("cummax" in str(traced.jaxpr)) == has_mask


def test_first_keys_by_hand():
    tokens = jnp.array([[5, 0, 3, 0, 0, 4], [0, 1, 2, 3, 4, 5]])
    np.testing.assert_array_equal(first_keys(tokens, 0), [[0, 1, 1, 3, 4, 4], [0] * 6])
    np.testing.assert_array_equal(
        first_keys(tokens, EndToken(0)), [[0, 0, 2, 2, 4, 5], [0, 1, 1, 1, 1, 1]]
    )


def test_sparse_attention_is_refused():
    config = ModelConfig.from_hf(sparse_config())
    message = "document_mask: expected False for sparse attention, deepseek_v32, got True"
    for settings in ({"indexer_stage": "sparse"}, {"lora_rank": 1}):
        with pytest.raises(ValueError, match=message):
            Trainer(abstract_model(config), dataclasses.replace(MASKED, **settings))
    model, length = random_model(config, 0), 1 + (config.index_topk or 0)
    tokens = jnp.zeros((1, length), jnp.int32)
    with pytest.raises(ValueError, match="first_keys: expected None with sparse attention"):
        model.hidden_states(tokens, mtp=False, first_keys=tokens)
