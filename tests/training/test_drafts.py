"""Training of the MTP layer to draft: what is trained, the loss, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.checkpoint.reader import SafetensorsFile, write_file
from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import random_model
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training.drafts import divergence, is_drafter
from dsv3_jax.training.losses import target_mask
from dsv3_jax.training.trainer import Trainer
from scripts import train_demo
from sharding import make_layout
from tests.training.tiny import CONFIG, RUN, TOKENS, evaluate, logits_as_states, step

DEPTH = 3
DRAFTING = dataclasses.replace(RUN, draft_depth=DEPTH, weight_decay=0.0)


@pytest.fixture(scope="module")
def drafting(model) -> Trainer:
    return Trainer(model, DRAFTING)


def flat(state) -> dict[str, np.ndarray]:
    return {".".join(map(str, path)): np.asarray(x) for path, x in nnx.to_flat_state(state)}


def two_layers(model: DeepSeekV3) -> DeepSeekV3:
    """Returns a model with two MTP layers, both with the weights of the model's one."""
    config = ModelConfig.from_hf(CONFIG | {"num_nextn_predict_layers": 2})
    both = DeepSeekV3(config, rngs=nnx.Rngs(0))
    weights = dict(nnx.to_flat_state(nnx.state(model)))
    copied = [
        (path, weights[("mtp", 0, *path[2:]) if path[0] == "mtp" else path])
        for path, _ in nnx.to_flat_state(nnx.state(both))
    ]
    nnx.update(both, nnx.from_flat_state(copied))
    return both


def test_a_layer_applied_twice_is_two_layers_with_its_weights(model):
    tokens = jnp.asarray(TOKENS)
    logits, aux = model(tokens, return_aux=True, draft_depth=2)
    want_logits, want = two_layers(model)(tokens, return_aux=True)
    np.testing.assert_array_equal(logits, want_logits)
    assert len(aux.mtp_logits) == 2
    for got, expected in zip(aux.mtp_logits, want.mtp_logits, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    assert len(aux.routing) == 2  # one MoE layer, and the MTP layer once


def test_the_loss_is_the_divergence_of_each_draft(model, drafting):
    tokens = jnp.asarray(TOKENS)
    logits, aux = model(tokens, return_aux=True, draft_depth=DEPTH)
    want = []
    for k, draft in enumerate(aux.mtp_logits):
        p, q = (np.asarray(jax.nn.softmax(x), np.float64) for x in (logits, draft))
        mask = np.asarray(target_mask(tokens, 0, k + 2))
        nats = [
            np.sum(p[b, i + k + 1] * np.log(p[b, i + k + 1] / q[b, i]))
            for b, i in np.argwhere(mask)
        ]
        want.append(np.mean(nats))
    got = evaluate(drafting, drafting.init())
    np.testing.assert_allclose(got.drafts, np.mean(want), rtol=1e-5)


def test_drafts_with_the_model_s_distribution_have_no_loss():
    logits = jax.random.normal(jax.random.key(0), (2, 8, 5))
    tokens, counts = jnp.ones((2, 8), jnp.int32), [jnp.int32(12), jnp.int32(10)]
    drafts = [logits[:, 1:], logits[:, 2:]]
    states = logits_as_states(logits, *drafts)
    assert abs(float(divergence(*states, tokens, 0, counts))) < 1e-6
    states = logits_as_states(logits, logits[:, 1:], -logits[:, 2:])
    assert float(divergence(*states, tokens, 0, counts)) > 0.1


def test_indexers_are_not_trained():
    assert is_drafter(("mtp", 0, "self_attn", "o_proj", "weight"))
    assert not is_drafter(("mtp", 0, "self_attn", "indexer", "wk", "weight"))
    assert not is_drafter(("layers", 0, "self_attn", "o_proj", "weight"))


def test_only_the_layer_that_drafts_is_trained(model, drafting):
    before, state = flat(nnx.state(model)), drafting.init()
    assert all(name.startswith("mtp.0.") for name in flat(state.params))
    losses = []
    for _ in range(12):
        state, metrics = step(drafting, state)
        losses.append(float(metrics.losses.drafts))
    assert losses[-1] < 0.7 * losses[0]
    after = flat(nnx.state(drafting.model(state)))
    assert before.keys() == after.keys()
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed
    assert all(name.startswith("mtp.0.") for name in changed)
    assert not any("e_score_correction_bias" in name for name in changed)
    np.testing.assert_array_equal(
        flat(nnx.state(model))["lm_head.weight"], before["lm_head.weight"]
    )


def test_microbatches_have_the_gradient_of_the_batch(model, drafting):
    parts = Trainer(model, dataclasses.replace(DRAFTING, accumulate=3))
    states = [step(trainer, trainer.init())[0] for trainer in (drafting, parts)]
    for a, b in zip(*(jax.tree.leaves(state.optimizer) for state in states), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 2}, "expected lora_rank 0, got 2"),
        ({"indexer_stage": "dense"}, "expected indexer_stage none, got dense"),
    ],
)
def test_other_kinds_of_training_are_refused(model, changes, message):
    with pytest.raises(ValueError, match=f"^draft_depth {DEPTH}: {message}$"):
        Trainer(model, dataclasses.replace(DRAFTING, **changes))


def test_models_that_cannot_draft_or_have_a_layout_are_refused():
    def trainer_of(**config) -> Trainer:
        model = DeepSeekV3(ModelConfig.from_hf(CONFIG | config), rngs=nnx.Rngs(0))
        return Trainer(model, DRAFTING)

    with pytest.raises(ValueError, match=r"expected a model with one MTP layer, got one with 0$"):
        trainer_of(num_nextn_predict_layers=0)
    layout = make_layout("train", devices=jax.devices()[:2])
    model = random_model(ModelConfig.from_hf(CONFIG), 0, layout)
    with pytest.raises(ValueError, match=r"expected a model on one device, got a layout$"):
        Trainer(model, DRAFTING)


def test_sequences_have_a_token_for_each_draft(drafting):
    state = drafting.init()
    with pytest.raises(ValueError, match=r"expected sequences of at least 5 tokens, got 4$"):
        step(drafting, state, TOKENS[:, :4])
    with pytest.raises(ValueError, match=r"^draft_depth: expected at least 0, got -1$"):
        dataclasses.replace(RUN, draft_depth=-1)


def test_the_demo_keeps_the_bytes_of_all_other_tensors(tmp_path):
    """Only the MTP layer, number 5, comes from the new checkpoint."""
    layers = ("model.layers.4.mlp.weight", "model.layers.5.mlp.weight", "model.layers.50.weight")
    for number, name in enumerate(("before", "after")):
        (tmp_path / name).mkdir()
        tensors = {layer: np.full((2, 3), number, np.float32) for layer in layers}
        write_file(tmp_path / name / "model.safetensors", tensors)
    train_demo.copy_frozen(tmp_path / "before", tmp_path / "after")
    got = SafetensorsFile(tmp_path / "after" / "model.safetensors")
    assert {name: float(tensor[...].max()) for name, tensor in got.items()} == {
        "model.layers.4.mlp.weight": 0,
        "model.layers.5.mlp.weight": 1,
        "model.layers.50.weight": 0,
    }
    before = SafetensorsFile(tmp_path / "before" / "model.safetensors")
    assert all((tensor[...] == 0).all() for tensor in before.values())
