"""Compares fifty training steps with torch: transformers' model, torch's AdamW and clipping.

Both sides begin with the weights of one checkpoint and train on the same batches in float32.
Losses, masks, schedules, balance loss and bias updates of the torch side are written from the V3
report and share no code with ours.
"""

import math
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.trainer import Trainer
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.training.tiny import biases

pytestmark = [pytest.mark.parity, pytest.mark.slow]

STEPS, BATCH, LENGTH, VOCAB = 50, 4, 24, 96
MODEL = tiny_config(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, first_k_dense_replace=1, q_lora_rank=24
)
RUN = TrainingConfig(
    steps=STEPS,
    learning_rate=0.004,
    final_learning_rate=0.0004,
    warmup_steps=5,
    decay_start=0.5,
    decay_end=0.9,
    mtp_weight_switch=0.6,
    bias_update_speed=0.01,
    bias_update_end=0.8,
    balance_weight=0.01,
    compute_dtype="float32",
)
BOUND = 1e-4  # relative error of every step's metrics; rounding causes 4e-7


class Record(NamedTuple):
    """Metrics of each step."""

    main: list[float]
    mtp: list[float]
    norm: list[float]
    loads: list[np.ndarray]


def batches() -> np.ndarray:
    """Returns tokens [steps, B, T]: five batches, repeated, with documents that end anywhere."""
    rng = np.random.default_rng(7)
    tokens = rng.integers(1, VOCAB, (5, BATCH, LENGTH))
    tokens[rng.uniform(size=tokens.shape) < 0.08] = 0
    tokens[:, :, 0] = 0
    return np.tile(tokens, (STEPS // 5, 1, 1))


def learning_rate(step: int) -> float:
    """Returns the learning rate: 5 steps of warm-up to 0.004, constant to step 25, cosine decay to
    step 45."""
    if step < 5:
        return 0.004 * (step + 1) / 5
    progress = min(max(step - 25, 0) / 20, 1.0)
    return 0.0004 + (0.004 - 0.0004) * (1 + math.cos(math.pi * progress)) / 2


def their_training(directory: Path) -> tuple[Record, list[np.ndarray]]:
    """Returns the metrics, and the final router biases of the main model's layer and the MTP
    layer."""
    import torch
    from transformers import DeepseekV3ForCausalLM
    from transformers.modeling_layers import MtpModel

    class Tiny(DeepseekV3ForCausalLM):
        # As in transformers, where the layer number is fixed to DeepSeek-V3's 61.
        _keys_to_ignore_on_load_unexpected = (r"model\.layers\.2\..*",)

    model = Tiny.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).train()
    mtp = MtpModel.from_pretrained(model).train()
    gates = [model.model.layers[1].mlp.gate, mtp.layers[0].mtp_block.mlp.gate]
    routed: dict[int, tuple] = {}
    for i, gate in enumerate(gates):
        gate.register_forward_hook(lambda _, __, out, i=i: routed.update({i: out}))
    parameters = {id(p): p for p in [*model.parameters(), *mtp.parameters()]}.values()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )

    def cross_entropy(logits, tokens: np.ndarray, ahead: int):
        targets = torch.tensor(tokens[:, ahead:].copy())
        for b in range(BATCH):
            for t in range(LENGTH - ahead):
                if (tokens[b, t + 1 : t + 1 + ahead] == 0).any():
                    targets[b, t] = -100
        return torch.nn.functional.cross_entropy(
            logits[:, : LENGTH - ahead].reshape(-1, VOCAB), targets.reshape(-1), ignore_index=-100
        )

    record = Record([], [], [], [])
    for step, tokens in enumerate(batches()):
        ids = torch.from_numpy(tokens)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        main = cross_entropy(model.lm_head(hidden), tokens, 1)
        positions = torch.arange(LENGTH - 1)[None]
        mtp_hidden = mtp.forward_layer(0, hidden[:, :-1], positions, None, input_ids=ids[:, 1:])
        mtp_loss = cross_entropy(model.lm_head(mtp_hidden), tokens, 2)

        balance, loads = torch.zeros(()), []
        for i, length in enumerate((LENGTH, LENGTH - 1)):
            logits, _, chosen = routed[i]
            E, K = logits.shape[-1], chosen.shape[-1]
            scores = logits.sigmoid().reshape(BATCH, length, E)
            one_hot = torch.nn.functional.one_hot(chosen, E).reshape(BATCH, length, K, E)
            frequency = one_hot.sum(dim=(1, 2)) * E / (K * length)
            shares = (scores / scores.sum(-1, keepdim=True)).mean(dim=1)
            balance = balance + (frequency * shares).sum(-1).mean()
            loads.append(one_hot.sum(dim=(0, 1, 2)))

        weight = 0.3 if step < 30 else 0.1
        optimizer.zero_grad()
        (main + weight * mtp_loss + 0.01 * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        if step < 40:
            for gate, load in zip(gates, loads, strict=True):
                gate.e_score_correction_bias += 0.01 * (load.float().mean() - load).sign()
        record.main.append(main.item())
        record.mtp.append(mtp_loss.item())
        record.norm.append(norm.item())
        record.loads.append(np.stack([load.numpy() for load in loads]))
    return record, [gate.e_score_correction_bias.numpy() for gate in gates]


def test_fifty_steps(tmp_path):
    write_checkpoint(tmp_path, MODEL, random_tensors(MODEL))
    their, their_biases = their_training(tmp_path)

    model, _ = dsv3_jax.load(tmp_path, dtype=jnp.float32)
    trainer = Trainer(model, RUN)
    state = trainer.init()
    our = Record([], [], [], [])
    for tokens in batches():
        state, metrics = trainer.step(state, jnp.asarray(tokens))
        our.main.append(float(metrics.losses.main))
        our.mtp.append(float(metrics.losses.mtp))
        our.norm.append(float(metrics.gradient_norm))
        our.loads.append(np.asarray(metrics.expert_load))

    assert their.main[-1] < 0.7 * their.main[0], "expected the loss to decrease"
    assert min(their.norm) < 1 < max(their.norm), "expected some gradients to be clipped"
    for name in ("main", "mtp", "norm"):
        got, want = (np.array(getattr(record, name)) for record in (our, their))
        assert np.max(np.abs(got / want - 1)) < BOUND, name
    np.testing.assert_array_equal(our.loads, their.loads)
    for got, want in zip(biases(state, layer=1), their_biases, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
