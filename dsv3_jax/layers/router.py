"""The router of an MoE layer, in float32."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32

from dsv3_jax.config import ModelConfig
from pallas_kernels import Routes, route
from pallas_kernels.matmul import float32_matmul
from pallas_kernels.residuals import named
from pallas_kernels.route.reference import Rule


class Router(nnx.Module):
    """Routes tokens by one of the three published methods (``topk_method``).

    * ``noaux_tc`` (V3): sigmoid scores s; experts are chosen by ``s + e_score_correction_bias``.
      The score of a group is the sum of its two best biased scores, and experts are chosen from the
      ``topk_group`` best groups. Weights are the *unbiased* s (V3 report, equations 12 to 16).
    * ``greedy``: softmax scores, plain top-k.
    * ``group_limited_greedy`` (V2): softmax scores; the score of a group is that of its best
      expert.

    Then weights are divided by their sum if ``norm_topk_prob`` is set, and multiplied by
    ``routed_scaling_factor``.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.config = config
        shape = (config.n_routed_experts, config.hidden_size)
        weight = jax.random.normal(rngs.params(), shape, jnp.float32) * config.initializer_range
        self.weight = nnx.Param(weight.astype(dtype))
        if config.topk_method == "noaux_tc":
            # Not a Param: training adjusts it by the expert's load, not by a gradient.
            self.e_score_correction_bias = RouterBias(
                jnp.zeros((config.n_routed_experts,), jnp.float32)
            )

    def __call__(self, x: Float[Array, "M D"], valid: Bool[Array, " M"] | None = None) -> Routes:
        """Returns the experts of each token, and the (token, expert) pairs sorted by expert.
        Padding, where ``valid`` is False, chooses experts too, but its pairs are in no group."""
        c = self.config
        routes = route(
            named("routes", _logits(x, self.weight[...])),
            self.e_score_correction_bias[...] if c.topk_method == "noaux_tc" else None,
            valid,
            **dataclasses.asdict(routing_rule(c)),
        )
        return named("routes", routes)


@jax.custom_vjp
def _logits(x: Float[Array, "M D"], weight: Float[Array, "E D"]) -> Float32[Array, "M E"]:
    """Returns ``weight @ x`` for every token x, in float32. So are its gradients, which keep the
    tokens in their own dtype."""
    if jnp.bfloat16 == x.dtype != weight.dtype:
        return float32_matmul(x, weight)
    # A product of two bfloat16 is exact in float32, in which they are summed. HIGHEST: a
    # float32 matmul may otherwise run in TF32 on a GPU and flip a close choice.
    # If all matmuls are float32, XLA would merge this one with the first two of the shared expert,
    # and the merged matmul has returned NaN on a Hopper GPU (jax issue 39486). The barrier keeps
    # them apart.
    tokens = jax.lax.optimization_barrier(x) if x.dtype == jnp.float32 else x
    return jnp.einsum(
        "md,ed->me",
        tokens,
        weight.astype(x.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _logits_forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    return _logits(x, weight), (x, weight)


def _logits_backward(
    saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    if x.dtype == jnp.bfloat16:
        d_x = float32_matmul(cotangent, weight, contracted=(1, 0))
        d_weight = float32_matmul(x, cotangent, contracted=(0, 0)).T
    else:
        highest = jax.lax.Precision.HIGHEST
        d_x = jnp.einsum("me,ed->md", cotangent, weight.astype(jnp.float32), precision=highest)
        d_weight = jnp.einsum("me,md->ed", cotangent, x, precision=highest)
    return d_x.astype(x.dtype), d_weight.astype(weight.dtype)


_logits.defvjp(_logits_forward, _logits_backward)


def routing_rule(config: ModelConfig) -> Rule:
    """Returns the routing settings of a model."""
    return Rule(
        num_experts_per_tok=config.num_experts_per_tok,
        n_group=config.n_group,
        topk_group=config.topk_group,
        method=config.topk_method,
        scoring=config.scoring_func,
        normalize=config.norm_topk_prob,
        scaling_factor=config.routed_scaling_factor,
    )


class RouterBias(nnx.Variable):
    """Variable type of ``e_score_correction_bias``."""
