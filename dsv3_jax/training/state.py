"""The training state: everything that changes from one step to the next."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int

from dsv3_jax.training import lora
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.drafts import is_drafter
from dsv3_jax.training.indexer import is_indexer
from dsv3_jax.training.tree import Tree, select


class TrainingState(NamedTuple):
    """Everything that changes from one step to the next. Each step donates its input state."""

    params: optax.Params
    """Trained parameters, float32: the master weights, or with ``lora_rank`` the low-rank updates
    of the frozen weights, which the Trainer keeps. In the dense stage of an indexer's training they
    are the indexers' weights, and with ``draft_depth`` those of the MTP layer."""
    biases: nnx.State
    """``e_score_correction_bias`` of every router, float32 [E] each. The load of the experts
    updates them; they have no gradient."""
    optimizer: optax.OptState
    """AdamW's two moments, float32 with the shapes of ``params``, and step counters."""
    step: Int[Array, ""]
    """Number of completed steps."""


def init_params(weights: Tree, biases: Tree, config: TrainingConfig) -> tuple[Tree, Tree]:
    """Returns the trained parameters and a copy of the router biases.

    The parameters are a float32 copy of the model's weights, or with ``lora_rank`` low-rank updates
    that are zero. In the dense stage of an indexer's training they are the indexers' weights, and
    with ``draft_depth`` those of the MTP layer.
    """
    if config.lora_rank:
        params = lora.init(weights, config.lora_rank, config.lora_seed)
    else:
        if config.indexer_stage == "dense":
            weights = select(weights, is_indexer)
        if config.draft_depth:
            weights = select(weights, is_drafter)
        params = jax.tree.map(lambda w: jnp.array(w, jnp.float32, copy=True), weights)
    return params, jax.tree.map(jnp.copy, biases)


def init_state(
    params: Tree, biases: Tree, optimizer: optax.GradientTransformation
) -> TrainingState:
    """Returns the state before the first step, with moments that are zero."""
    return TrainingState(params, biases, optimizer.init(params), jnp.int32(0))
