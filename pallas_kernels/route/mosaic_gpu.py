"""route on Hopper GPUs: a single kernel for the few tokens of a decode step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from pallas_kernels.hopper import require_hopper
from pallas_kernels.route.kernel import MAX_TOKENS, choose_and_sort
from pallas_kernels.route.reference import Routes, Rule

_EXPERT_MULTIPLE = 32
_MAX_EXPERTS = 384
_MAX_EXPERTS_PER_TOKEN = 16
_MAX_GROUPS = 8


def route(
    logits: Float32[Array, "M E"],
    bias: Float32[Array, " E"] | None,
    valid: Bool[Array, " M"] | None,
    *,
    rule: Rule,
    interpret: Any = None,
) -> Routes:
    """Implements :func:`pallas_kernels.route`. Its gradient is the reference's.

    Raises:
      NotImplementedError: no Hopper GPU; no tokens or more than 512 (256 if K > 8); a number of
        experts that is not a multiple of 32 or exceeds 384; K > 16; or more than 8 groups.
    """
    require_hopper(interpret)
    (M, E), K = logits.shape, rule.num_experts_per_tok
    limit = MAX_TOKENS if K <= _MAX_EXPERTS_PER_TOKEN // 2 else MAX_TOKENS // 2
    if not 0 < M <= limit:
        raise NotImplementedError(f"takes 1 to {limit} tokens with {K} experts each, got {M}")
    if E % _EXPERT_MULTIPLE or not 0 < E <= _MAX_EXPERTS:
        raise NotImplementedError(
            f"takes a multiple of {_EXPERT_MULTIPLE} experts, {_MAX_EXPERTS} at most, got {E}"
        )
    if K > _MAX_EXPERTS_PER_TOKEN:
        raise NotImplementedError(
            f"takes {_MAX_EXPERTS_PER_TOKEN} experts per token at most, got {K}"
        )
    if rule.n_group > _MAX_GROUPS:
        raise NotImplementedError(f"takes {_MAX_GROUPS} groups at most, got {rule.n_group}")
    return _route(logits, bias, valid, rule, interpret)


def _run(logits, bias, valid, rule: Rule, interpret: Any) -> Routes:
    valid = None if valid is None else valid.astype(jnp.int32)
    return Routes(*choose_and_sort(logits, bias, valid, rule=rule, interpret=interpret))


def _forward(logits, bias, valid, rule, interpret):
    routes = _run(logits, bias, valid, rule, interpret)
    return routes, (logits, routes.experts)


def _backward(rule, interpret, residuals, cotangents):
    logits, experts = residuals

    def scores_and_weights(logits):
        scores = rule.scores(logits)
        return scores, rule.weights(scores, experts)

    vjp = jax.vjp(scores_and_weights, logits)[1]
    return *vjp((cotangents.scores, cotangents.weights)), None, None


_route = jax.custom_vjp(_run, nondiff_argnums=(3, 4))
_route.defvjp(_forward, _backward)
