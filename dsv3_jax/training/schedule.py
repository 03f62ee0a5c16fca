"""Schedules: learning rate, weight of the MTP loss, and speed of the router bias updates."""

from __future__ import annotations

import optax

from dsv3_jax.training.config import TrainingConfig


def learning_rate(config: TrainingConfig) -> optax.Schedule:
    """Returns the learning rate of each step: linear warm-up from 0, constant, cosine decay,
    constant (V3 report, section 4.2).

    The report trains the last 1.1% of its run at a third of the final learning rate. This schedule
    does not.
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
    warmup = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
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
