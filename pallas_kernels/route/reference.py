"""Reference implementation of route: scores, a masked top-k and a stable sort, in float32."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from pallas_kernels.residuals import named

METHODS = ("noaux_tc", "greedy", "group_limited_greedy")
SCORINGS = ("sigmoid", "softmax")


class Routes(NamedTuple):
    """Result of routing: K experts per token, and the (token, expert) pairs sorted by expert. Pair
    ``t * K + j`` is token t's j-th choice."""

    scores: Float32[Array, "M E"]
    """Scores of all experts, without the bias."""
    experts: Int[Array, "M K"]
    """Chosen experts, best first. Defined for invalid tokens too."""
    weights: Float32[Array, "M K"]
    """Routing weights of the chosen experts."""
    order: Int[Array, " MK"]
    """Pairs sorted by expert, then by token. Those of invalid tokens come last."""
    inverse: Int[Array, " MK"]
    """Position of each pair in ``order``."""
    group_sizes: Int[Array, " E"]
    """Number of pairs of each expert, without those of invalid tokens."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Static routing settings: the keyword arguments of :func:`pallas_kernels.route`."""

    num_experts_per_tok: int
    n_group: int
    topk_group: int
    method: str
    scoring: str
    normalize: bool
    scaling_factor: float

    def check(self, logits: jax.Array, bias: jax.Array | None, valid: jax.Array | None) -> None:
        """Raises ValueError if arrays and settings are inconsistent."""
        M, E = logits.shape
        K, group = self.num_experts_per_tok, E // self.n_group
        for name, value, allowed in (
            ("method", self.method, METHODS),
            ("scoring", self.scoring, SCORINGS),
        ):
            if value not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")
        if E % self.n_group or not 1 <= self.topk_group <= self.n_group:
            raise ValueError(
                f"n_group: expected to divide E={E} and to be topk_group={self.topk_group} or"
                f" more, got {self.n_group}"
            )
        if self.method == "noaux_tc" and self.n_group > 1 and group < 2:
            raise ValueError(f"n_group: expected groups of two experts or more, got {group}")
        if not 1 <= K <= self.topk_group * group:
            raise ValueError(
                f"num_experts_per_tok: expected 1 to {self.topk_group * group}, the experts in"
                f" the chosen groups, got {K}"
            )
        if bias is not None and bias.shape != (E,):
            raise ValueError(f"bias: expected shape {(E,)}, got {bias.shape}")
        if valid is not None and valid.shape != (M,):
            raise ValueError(f"valid: expected shape {(M,)}, got {valid.shape}")

    def scores(self, logits: Float32[Array, "M E"]) -> Float32[Array, "M E"]:
        """Returns the scores of all experts."""
        if self.scoring == "sigmoid":
            return jax.nn.sigmoid(logits)
        return jax.nn.softmax(logits, axis=-1)

    def weights(
        self, scores: Float32[Array, "M E"], experts: Int[Array, "M K"]
    ) -> Float32[Array, "M K"]:
        """Returns the routing weights of the chosen experts."""
        weights = _chosen(scores, experts)
        if self.normalize:
            # 1e-20, because with a large bias all chosen sigmoids may underflow to zero.
            weights /= jnp.sum(weights, axis=-1, keepdims=True) + 1e-20
        return weights * self.scaling_factor

    def mask_groups(self, choice: Float32[Array, "M E"]) -> Float32[Array, "M E"]:
        """Sets the biased scores of experts outside the best groups to -inf."""
        if self.n_group == 1:
            return choice
        grouped = choice.reshape(-1, self.n_group, choice.shape[1] // self.n_group)
        if self.method == "noaux_tc":
            group_scores = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
        else:
            group_scores = jnp.max(grouped, axis=-1)
        _, best_groups = jax.lax.top_k(group_scores, self.topk_group)
        mask = jnp.any(best_groups[:, :, None] == jnp.arange(self.n_group), axis=1)
        # -inf instead of 0, because a biased score may be negative, and 0 would exceed it.
        return jnp.where(mask[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


@jax.custom_vjp
def _chosen(scores: Float32[Array, "M E"], experts: Int[Array, "M K"]) -> Float32[Array, "M K"]:
    """Returns the scores of the chosen experts. The gradient compares instead of scattering."""
    return jnp.take_along_axis(scores, experts, axis=-1)


def _chosen_forward(scores: jax.Array, experts: jax.Array) -> tuple[jax.Array, Any]:
    return _chosen(scores, experts), (experts, jnp.arange(scores.shape[1]))


def _chosen_backward(saved: Any, cotangent: jax.Array) -> tuple[jax.Array, None]:
    experts, numbers = saved
    is_chosen = experts[:, :, None] == numbers
    return jnp.sum(jnp.where(is_chosen, cotangent[:, :, None], 0.0), axis=1), None


_chosen.defvjp(_chosen_forward, _chosen_backward)


def route(
    logits: Float32[Array, "M E"],
    bias: Float32[Array, " E"] | None,
    valid: Bool[Array, " M"] | None,
    *,
    rule: Rule,
) -> Routes:
    E, K = logits.shape[1], rule.num_experts_per_tok
    scores = rule.scores(logits)
    choice = scores if bias is None else scores + bias
    experts = named("routes", jax.lax.top_k(rule.mask_groups(choice), K)[1])
    weights = rule.weights(scores, experts)
    order, inverse, group_sizes = sort_pairs(experts, valid, E)
    return Routes(scores, experts, weights, order, inverse, group_sizes)


def sort_pairs(
    experts: Int[Array, "M K"], valid: Bool[Array, " M"] | None, num_experts: int
) -> tuple[Int[Array, " MK"], Int[Array, " MK"], Int[Array, " E"]]:
    """Sorts the (token, expert) pairs by expert.

    Returns ``order``, ``inverse`` and ``group_sizes`` of :class:`Routes`.

    Args:
      experts: experts of each token, from 0 to ``num_experts - 1``.
      valid: False for tokens that go to no expert.
    """
    # Expert number E sorts after every expert and is not counted.
    counted = experts if valid is None else jnp.where(valid[:, None], experts, num_experts)
    flat = counted.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    # Comparing and summing is one kernel; a histogram needs another to clear its counts.
    group_sizes = jnp.sum(jnp.arange(num_experts)[:, None] == flat, axis=1, dtype=jnp.int32)
    return order, jnp.argsort(order), group_sizes
