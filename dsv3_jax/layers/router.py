"""Which experts a token goes to, and with what weight. All of it in float32."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from dsv3_jax.config import ModelConfig


class Routing(NamedTuple):
    """K experts a token, best first."""

    experts: Int[Array, "M K"]
    weights: Float32[Array, "M K"]
    scores: Float32[Array, "M E"]
    """Every expert's unbiased score: sigmoid or softmax."""


class Router(nnx.Module):
    """The three published ways to choose (``topk_method``).

    * ``noaux_tc`` (V3): sigmoid scores s; choice by ``s + e_score_correction_bias``. A group is as
      good as its two best biased scores together; outside the ``topk_group`` best groups nothing is
      chosen. Weights are the *unbiased* s (V3 report, equations 12 to 16).
    * ``greedy``: softmax scores, plain top-k.
    * ``group_limited_greedy`` (V2): softmax scores; a group is as good as its best expert.

    Then, under ``norm_topk_prob``, weights are divided by their sum, and they are multiplied by
    ``routed_scaling_factor``.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.config = config
        shape = (config.n_routed_experts, config.hidden_size)
        weight = jax.random.normal(rngs.params(), shape, jnp.float32) * config.initializer_range
        self.weight = nnx.Param(weight.astype(dtype))
        if config.topk_method == "noaux_tc":
            # Not a Param: training moves it by the load of its expert, not by a gradient.
            self.e_score_correction_bias = RouterBias(
                jnp.zeros((config.n_routed_experts,), jnp.float32)
            )

    def __call__(self, x: Float[Array, "M D"]) -> Routing:
        c = self.config
        # HIGHEST: a float32 matmul may otherwise run in TF32 on a GPU and flip a close choice.
        logits = jnp.einsum(
            "md,ed->me",
            x.astype(jnp.float32),
            self.weight[...].astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        if c.scoring_func == "sigmoid":
            scores = jax.nn.sigmoid(logits)
            choice = scores + self.e_score_correction_bias[...]
        else:
            scores = choice = jax.nn.softmax(logits, axis=-1)
        _, experts = jax.lax.top_k(self._mask_groups(choice), c.num_experts_per_tok)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if c.norm_topk_prob:
            # 1e-20: with a large bias, all chosen sigmoids may underflow to zero.
            weights /= jnp.sum(weights, axis=-1, keepdims=True) + 1e-20
        return Routing(experts, weights * c.routed_scaling_factor, scores)

    def _mask_groups(self, choice: Float32[Array, "M E"]) -> Float32[Array, "M E"]:
        c = self.config
        if c.n_group == 1:
            return choice
        grouped = choice.reshape(-1, c.n_group, c.n_routed_experts // c.n_group)
        if c.topk_method == "noaux_tc":
            group_scores = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
        else:
            group_scores = jnp.max(grouped, axis=-1)
        _, kept = jax.lax.top_k(group_scores, c.topk_group)
        mask = jnp.any(kept[:, :, None] == jnp.arange(c.n_group), axis=1)
        # -inf, not 0: a biased score may be negative, and then 0 would win.
        return jnp.where(mask[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


class RouterBias(nnx.Variable):
    """Variable type of ``e_score_correction_bias``."""
