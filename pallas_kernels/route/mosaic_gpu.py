"""route on Hopper GPUs: one kernel for the few tokens of a decode step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from pallas_kernels.hopper import require_hopper
from pallas_kernels.route.mosaic_gpu_kernel import MOST_TOKENS, choose_and_sort
from pallas_kernels.route.reference import Routes, Rule

_EXPERTS = 32
_MOST_EXPERTS = 384
_MOST_CHOICES = 16
_MOST_GROUPS = 8


def route(
    logits: Float32[Array, "M E"],
    bias: Float32[Array, " E"] | None,
    valid: Bool[Array, " M"] | None,
    *,
    rule: Rule,
    interpret: Any = None,
) -> Routes:
    """As :func:`pallas_kernels.route`; its gradient is the reference's.

    Raises:
      NotImplementedError: no Hopper GPU, no or more than 512 tokens (256 of more than 8 choices),
        experts that are no multiple of 32 or more than 384, more than 16 choices a token, or more
        than 8 groups.
    """
    require_hopper(interpret)
    (M, E), K = logits.shape, rule.num_experts_per_tok
    most = MOST_TOKENS if K <= _MOST_CHOICES // 2 else MOST_TOKENS // 2
    if not 0 < M <= most:
        raise NotImplementedError(f"takes 1 to {most} tokens of {K} choices, got {M}")
    if E % _EXPERTS or not 0 < E <= _MOST_EXPERTS:
        raise NotImplementedError(f"takes {_MOST_EXPERTS} experts at most, in {_EXPERTS}, got {E}")
    if K > _MOST_CHOICES:
        raise NotImplementedError(f"takes {_MOST_CHOICES} choices a token at most, got {K}")
    if rule.n_group > _MOST_GROUPS:
        raise NotImplementedError(f"takes {_MOST_GROUPS} groups at most, got {rule.n_group}")
    return _route(logits, bias, valid, rule, interpret)


def _run(logits, bias, valid, rule: Rule, interpret: Any) -> Routes:
    valid = None if valid is None else valid.astype(jnp.int32)
    return Routes(*choose_and_sort(logits, bias, valid, rule=rule, interpret=interpret))


def _forward(logits, bias, valid, rule, interpret):
    routes = _run(logits, bias, valid, rule, interpret)
    return routes, (logits, routes.experts)


def _backward(rule, interpret, kept, cotangents):
    logits, experts = kept

    def of_logits(logits):
        scores = rule.scores(logits)
        return scores, rule.weights(scores, experts)

    pulled = jax.vjp(of_logits, logits)[1]
    return *pulled((cotangents.scores, cotangents.weights)), None, None


_route = jax.custom_vjp(_run, nondiff_argnums=(3, 4))
_route.defvjp(_forward, _backward)
