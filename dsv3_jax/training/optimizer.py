"""The optimizer: AdamW after clipping the norm of the gradient."""

from __future__ import annotations

import jax
import optax

from dsv3_jax.training import schedule
from dsv3_jax.training.config import TrainingConfig


def make_optimizer(config: TrainingConfig) -> optax.GradientTransformation:
    """Returns AdamW with the configured learning rate schedule, after clipping the global norm of
    the gradient. Weight decay applies to matrices only, not to vectors such as norm weights."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule.learning_rate(config),
            b1=config.betas[0],
            b2=config.betas[1],
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        ),
    )
