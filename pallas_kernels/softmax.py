"""Softmax attention over a part of the keys, with its log-sum-exp: merge of two parts, gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Float32

from pallas_kernels.residuals import named


def masked_softmax(
    scores: Float32[Array, "*rows S"], mask: Bool[Array, "*#rows S"]
) -> tuple[Float32[Array, "*rows S"], Float32[Array, "*rows"]]:
    """Returns the softmax over the entries where ``mask`` is True, and their log-sum-exp.

    A row without such entries has zeros and -inf, so that it has no weight in a later merge.
    """
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    # Without the inner where, rows without entries would compute exp(-inf - -inf), which is NaN.
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    safe = jnp.where(total == 0.0, 1.0, total)
    lse = jnp.where(total == 0.0, -jnp.inf, jnp.log(safe) + top)
    return weights / safe, lse[..., 0]


def merge_attention(
    out_a: Float[Array, "B T H V"],
    lse_a: Float32[Array, "B T H"],
    out_b: Float[Array, "B T H V"],
    lse_b: Float32[Array, "B T H"],
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
    """Returns the attention over the union of two disjoint sets of keys, from that over each.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = sum_i exp(lse_i - lse) out_i``. A part without
    keys has lse -inf and no weight. Two such parts give zeros and -inf.
    """
    lse = jnp.logaddexp(lse_a, lse_b)
    finite = jnp.where(lse == -jnp.inf, 0.0, lse)
    out = out_a * jnp.exp(lse_a - finite)[..., None] + out_b * jnp.exp(lse_b - finite)[..., None]
    return out.astype(out_a.dtype), lse


def with_gradients(attend: Callable[..., Any], gradients: Callable[..., Any]) -> Callable[..., Any]:
    """Makes attention differentiable. Its results are kept for the gradient, not its probabilities.

    Args:
      attend: function that returns ``out`` and ``lse``. Some of its arrays may be None.
      gradients: function of these arrays, ``out``, ``lse`` and their cotangents. It returns the
        gradients of the first arrays; the others have none. The cotangent of ``lse`` is None where
        lse has no effect on what is differentiated.
    """

    @jax.custom_vjp
    def call(*arrays: Any) -> Any:
        return attend(*arrays)

    def forward(*arrays: Any) -> Any:
        arrays = tuple(None if x is None else x.value for x in arrays)
        out, lse = named("attention", attend(*arrays))
        return (out, lse), (*arrays, out, lse)

    def backward(residuals: Any, cotangents: Any) -> Any:
        *arrays, out, lse = residuals
        d_out, d_lse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
        d_out = jnp.zeros_like(out) if d_out is None else d_out
        results = gradients(*arrays, out, lse, d_out, d_lse)
        return *results, *[None] * (len(arrays) - len(results))

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call
