"""route on Hopper GPUs: a single kernel for the tokens of a decode step, two for more tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from pallas_kernels.hopper import require_hopper
from pallas_kernels.route.kernel import choose_and_sort
from pallas_kernels.route.plan import MAX_TOKENS
from pallas_kernels.route.reference import Routes, Rule

_MAX_EXPERTS = 384
_MAX_EXPERTS_PER_TOKEN = 16
_MAX_GROUPS = 8


def route(
    logits: Float32[Array, "M E"],
    bias: Float32[Array, " E"] | None,
    valid: Bool[Array, " M"] | None,
    *,
    rule: Rule,
    one_kernel: bool | None = None,
    interpret: Any = None,
) -> Routes:
    """Implements :func:`pallas_kernels.route`. Its gradient is the reference's.

    Args:
      one_kernel: whether one cluster of programs does everything, or two kernels use the whole GPU;
        by default whichever is expected to take less time. It does not affect the result.
      interpret: parameters of Mosaic GPU's interpreter, to run without a GPU.

    Raises:
      NotImplementedError: no Hopper GPU; no tokens or more than 16,384; more than 384 experts;
        K > 16; or more than 8 groups.
    """
    require_hopper(interpret)
    (M, E), K = logits.shape, rule.num_experts_per_tok
    if not 0 < M <= MAX_TOKENS:
        raise NotImplementedError(f"takes 1 to {MAX_TOKENS} tokens, got {M}")
    if E > _MAX_EXPERTS:
        raise NotImplementedError(f"takes {_MAX_EXPERTS} experts at most, got {E}")
    if K > _MAX_EXPERTS_PER_TOKEN:
        raise NotImplementedError(
            f"takes {_MAX_EXPERTS_PER_TOKEN} experts per token at most, got {K}"
        )
    if rule.n_group > _MAX_GROUPS:
        raise NotImplementedError(f"takes {_MAX_GROUPS} groups at most, got {rule.n_group}")
    return _route(logits, bias, valid, rule, one_kernel, interpret)


def _run(logits, bias, valid, rule: Rule, one_kernel: bool | None, interpret: Any) -> Routes:
    valid = None if valid is None else valid.astype(jnp.int32)
    options = {"rule": rule, "one_kernel": one_kernel, "interpret": interpret}
    return Routes(*choose_and_sort(logits, bias, valid, **options))


def _forward(logits, bias, valid, *options):
    routes = _run(logits, bias, valid, *options)
    return routes, (logits, routes.experts)


def _backward(rule, one_kernel, interpret, residuals, cotangents):
    del one_kernel, interpret
    logits, experts = residuals

    def scores_and_weights(logits):
        scores = rule.scores(logits)
        return scores, rule.weights(scores, experts)

    vjp = jax.vjp(scores_and_weights, logits)[1]
    return *vjp((cotangents.scores, cotangents.weights)), None, None


_route = jax.custom_vjp(_run, nondiff_argnums=(3, 4, 5))
_route.defvjp(_forward, _backward)
