"""The optimizer, AdamW after clipping the norm of the gradient, and all schedules of a run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from dsv3_jax.training.config import TrainingConfig


def learning_rate(config: TrainingConfig) -> optax.Schedule:
    """Returns the learning rate of each step: linear warm-up, constant, cosine decay, constant (V3
    report, section 4.2).

    Step i, counted from 0, of N warm-up steps has ``(i + 1) / N`` of the peak: a rate of 0 would
    waste the first step. The report trains the last 1.1% of its run at a third of the final
    learning rate. This schedule does not.
    """
    decay_start = max(config.warmup_steps, config.step_at(config.decay_start))
    cosine = optax.cosine_decay_schedule(
        config.learning_rate,
        max(config.step_at(config.decay_end) - decay_start, 1),
        alpha=config.final_learning_rate / config.learning_rate,
    )
    constant = optax.constant_schedule(config.learning_rate)
    if config.warmup_steps == 0:
        return optax.join_schedules([constant, cosine], [decay_start])

    def warmup(step: ArrayLike) -> Any:
        return config.learning_rate * (jnp.asarray(step) + 1) / config.warmup_steps

    return optax.join_schedules([warmup, constant, cosine], [config.warmup_steps, decay_start])


def mtp_weight(config: TrainingConfig) -> optax.Schedule:
    """Returns the factor of the MTP loss, lambda in equation 25 of the V3 report."""
    return _switch(
        config.mtp_weight, config.final_mtp_weight, config.step_at(config.mtp_weight_switch)
    )


def bias_update_speed(config: TrainingConfig) -> optax.Schedule:
    """Returns the speed of the router bias updates, gamma in section 2.1.2 of the V3 report, which
    drops to 0 towards the end of the run.

    It is 0 throughout when experts are frozen, as by low-rank updates. Router biases balance the
    load while experts train: moving a bias would only send tokens away from the experts that were
    trained for them.
    """
    speed = 0.0 if config.freezes_weights else config.bias_update_speed
    return _switch(speed, 0.0, config.step_at(config.bias_update_end))


def _switch(before: float, after: float, step: int) -> optax.Schedule:
    constant = optax.constant_schedule
    return optax.join_schedules([constant(before), constant(after)], [step])


def make_optimizer(config: TrainingConfig) -> optax.GradientTransformation:
    """Returns AdamW with the configured learning rate schedule, after clipping the global norm of
    the gradient. Weight decay applies to matrices only, not to vectors such as norm weights."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config),
            b1=config.betas[0],
            b2=config.betas[1],
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        ),
    )
