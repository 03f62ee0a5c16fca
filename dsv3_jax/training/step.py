"""One training step, as a pure function of the training state."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int

from dsv3_jax.training import schedule
from dsv3_jax.training.balance import imbalance, update_biases
from dsv3_jax.training.losses import Losses
from dsv3_jax.training.objective import Objective
from dsv3_jax.training.state import TrainingState
from dsv3_jax.training.tree import Tree


class Metrics(NamedTuple):
    """Metrics of one step. Losses and loads are those of the parameters before the step."""

    losses: Losses
    gradient_norm: Float32[Array, ""]
    """Global norm of the gradient before clipping."""
    learning_rate: Float32[Array, ""]
    mtp_weight: Float32[Array, ""]
    """Factor of the MTP loss in this step."""
    expert_imbalance: Float32[Array, ""]
    """Maximum load divided by mean load, averaged over MoE layers."""
    expert_load: Int[Array, "L_moe E"]
    """Number of tokens that chose each expert, in the main model's MoE layers and then in the MTP
    layers."""


def training_step(
    state: TrainingState,
    frozen: Tree | None,
    tokens: Int[Array, "B T"],
    *,
    objective: Objective,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainingState, Metrics]:
    """Updates the parameters by the gradient and the router biases by the expert loads.

    Args:
      frozen: weights that ``state.params`` are low-rank updates of, or None.
      tokens: packed documents that begin with BOS.
    """
    config = objective.config
    mtp_weight = jnp.float32(schedule.mtp_weight(config)(state.step))
    grads, losses, load = objective.gradient(state.params, frozen, state.biases, tokens, mtp_weight)
    updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    bias_speed = jnp.float32(schedule.bias_update_speed(config)(state.step))
    biases = update_biases(state.biases, load, bias_speed)
    metrics = Metrics(
        losses,
        optax.tree.norm(grads),
        jnp.float32(schedule.learning_rate(config)(state.step)),
        mtp_weight,
        imbalance(load),
        load,
    )
    return TrainingState(params, biases, optimizer_state, state.step + 1), metrics
