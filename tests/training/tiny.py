"""Configuration and data of a tiny run, and helpers that read its state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv3_jax.layers.linear import Linear
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.model_io import Hidden, HiddenStates
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.cross_entropy import LossHead
from dsv3_jax.training.losses import Losses
from dsv3_jax.training.state import TrainingState
from dsv3_jax.training.step import Metrics
from dsv3_jax.training.trainer import Trainer
from tests.support.checkpoints import BIAS, tiny_config

# One MoE layer and one MTP layer.
CONFIG = tiny_config(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=1,
    first_k_dense_replace=0,
    moe_intermediate_size=20,
    num_attention_heads=2,
    num_key_value_heads=2,
)
RUN = TrainingConfig(
    steps=24,
    learning_rate=0.02,
    final_learning_rate=0.002,
    warmup_steps=2,
    clip_norm=1e9,  # so that the first moments of the optimizer are the gradients times 1 - beta
    bias_update_speed=0.01,
    balance_weight=0.1,  # large enough to matter among the other losses
    compute_dtype="float32",
)
# Documents of uneven lengths, so that sequences and microbatches have unequal numbers of targets.
TOKENS = np.random.default_rng(1).integers(1, 32, (6, 12))
TOKENS[:, 0] = 0
for _sequence, _position in (
    (0, 2),
    (0, 3),
    (0, 5),
    (0, 6),
    (1, 8),
    (3, 5),
    (3, 7),
    (3, 9),
    (5, 11),
):
    TOKENS[_sequence, _position] = 0


def logits_as_states(*logits: jax.Array) -> tuple[LossHead, HiddenStates]:
    """Returns a head and hidden states that have these logits: the main model's [B, T, W], then
    those of MTP layers, which are shorter. Padding has other values."""
    T, W = logits[0].shape[1:]
    head = Linear(W, W, std=1.0, rngs=nnx.Rngs(0), dtype=jnp.float32)
    head.weight.set_value(jnp.eye(W))
    main, *mtp = (
        jnp.pad(x, ((0, 0), (0, T - x.shape[1]), (0, 0)), constant_values=7.0) for x in logits
    )
    return LossHead(head), HiddenStates(
        Hidden(main, main), tuple(Hidden(x, x) for x in mtp), (), ()
    )


def step(
    trainer: Trainer, state: TrainingState, tokens: np.ndarray = TOKENS
) -> tuple[TrainingState, Metrics]:
    """Performs one step on a copy of the state, because `Trainer.step` donates its argument."""
    return trainer.step(jax.tree.map(jnp.copy, state), jnp.asarray(tokens))


def evaluate(trainer: Trainer, state: TrainingState) -> Losses:
    return trainer.evaluate(state, jnp.asarray(TOKENS))


def weighted(losses: Losses, config: TrainingConfig = RUN) -> float:
    """Returns the objective of the first steps of a run, summed in float64."""
    main, mtp, balance = float(losses.main), float(losses.mtp), float(losses.balance)
    return main + config.mtp_weight * mtp + config.balance_weight * balance


def biases(state: TrainingState, layer: int = 0) -> list[np.ndarray]:
    """Returns the biases of the main model's only router, which is in ``layer``, and of the MTP
    layer's router."""
    flat = dict(nnx.to_flat_state(state.biases))
    assert len(flat) == 2
    router = ("mlp", "gate", BIAS)
    layers = (("layers", layer), ("mtp", 0))
    return [np.asarray(flat[*path, *router].get_value()) for path in layers]


def gradients(trainer: Trainer, start: TrainingState, config: TrainingConfig = RUN) -> Any:
    """Returns the gradients of the first step, from the optimizer's moments.

    Args:
      start: state with moments of zero.
    """
    stepped, _ = step(trainer, start)
    moments = stepped.optimizer[1][0].mu
    return jax.tree.map(lambda moment: moment / (1 - config.betas[0]), moments)


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """Returns the leaves of a pytree by path."""
    return {jax.tree_util.keystr(p): np.asarray(a) for p, a in jax.tree.leaves_with_path(tree)}


def as_model(trainer: Trainer, state: TrainingState, params: Any) -> DeepSeekV3:
    """Returns the model with other values, such as gradients, as its weights."""
    return trainer.model(state._replace(params=params))
