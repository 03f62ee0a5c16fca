"""What the tests of training share: a tiny run's constants and data, and reading its state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training.config import TrainingConfig
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
    clip_norm=1e9,  # so that the optimiser's first moments are the gradients, times 1 - beta
    bias_update_speed=0.01,
    balance_weight=0.1,  # enough to be seen beside the other losses
    compute_dtype="float32",
)
# Documents of uneven lengths, so that neither rows nor parts of the batch count equally.
TOKENS = np.random.default_rng(1).integers(1, 32, (6, 12))
TOKENS[:, 0] = 0
for _row, _place in ((0, 2), (0, 3), (0, 5), (0, 6), (1, 8), (3, 5), (3, 7), (3, 9), (5, 11)):
    TOKENS[_row, _place] = 0


def step(
    trainer: Trainer, state: TrainingState, tokens: np.ndarray = TOKENS
) -> tuple[TrainingState, Metrics]:
    """One step; `Trainer.step` takes its state for itself, so it is given a copy."""
    return trainer.step(jax.tree.map(jnp.copy, state), jnp.asarray(tokens))


def evaluate(trainer: Trainer, state: TrainingState) -> Losses:
    return trainer.evaluate(state, jnp.asarray(TOKENS))


def weighted(found: Losses, config: TrainingConfig = RUN) -> float:
    """What the first steps of a run minimise, summed in float64."""
    main, mtp, balance = (float(each) for each in (found.main, found.mtp, found.balance))
    return main + config.mtp_weight * mtp + config.balance_weight * balance


def biases(state: TrainingState, layer: int = 0) -> list[np.ndarray]:
    """Of the main model's only router, which is in ``layer``, then the MTP layer's."""
    flat = dict(nnx.to_flat_state(state.biases))
    assert len(flat) == 2
    ends = ("mlp", "gate", BIAS)
    return [np.asarray(flat[*at, *ends].get_value()) for at in (("layers", layer), ("mtp", 0))]


def gradients(trainer: Trainer, start: TrainingState, config: TrainingConfig = RUN) -> Any:
    """Of the first step, as the optimiser saw them: `start` must have moments of zero."""
    stepped, _ = step(trainer, start)
    moments = stepped.optimizer[1][0].mu
    return jax.tree.map(lambda moment: moment / (1 - config.betas[0]), moments)


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """Leaves by path."""
    return {jax.tree_util.keystr(p): np.asarray(a) for p, a in jax.tree.leaves_with_path(tree)}


def as_model(trainer: Trainer, state: TrainingState, params: Any) -> DeepSeekV3:
    """The model with other values, such as gradients, in the places of its weights."""
    return trainer.model(state._replace(params=params))
