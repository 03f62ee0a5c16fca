"""What changes with the step: learning rate, weight of the MTP loss, speed of the biases."""

from __future__ import annotations

import optax

from dsv3_jax.training.config import TrainingConfig


def learning_rate(config: TrainingConfig) -> optax.Schedule:
    """Linear from 0, constant, half a cosine, constant (V3 report, section 4.2).

    The report ends with 1.1 % of the run at a third of the final learning rate; this does not.
    """
    decay_start = max(config.warmup_steps, config.at(config.decay_start))
    cosine = optax.cosine_decay_schedule(
        config.learning_rate,
        max(config.at(config.decay_end) - decay_start, 1),
        alpha=config.final_learning_rate / config.learning_rate,
    )
    constant = optax.constant_schedule(config.learning_rate)
    if config.warmup_steps == 0:
        return optax.join_schedules([constant, cosine], [decay_start])
    warmup = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps)
    return optax.join_schedules([warmup, constant, cosine], [config.warmup_steps, decay_start])


def mtp_weight(config: TrainingConfig) -> optax.Schedule:
    """Lambda of the V3 report's equation 25."""
    return _switch(config.mtp_weight, config.final_mtp_weight, config.at(config.mtp_weight_switch))


def bias_update_speed(config: TrainingConfig) -> optax.Schedule:
    """Gamma of the V3 report's section 2.1.2, then 0.

    With low-rank updates it is 0 throughout: biases balance the training of experts, and these do
    not train. To move the bias would only send tokens away from the experts they were trained for.
    """
    speed = 0.0 if config.lora_rank else config.bias_update_speed
    return _switch(speed, 0.0, config.at(config.bias_update_end))


def _switch(before: float, after: float, step: int) -> optax.Schedule:
    constant = optax.constant_schedule
    return optax.join_schedules([constant(before), constant(after)], [step])
