"""The gradient of sparse_mla_prefill, from its result and log-sum-exp.

Blocks of queries gather their tokens again, so that memory is linear in the number of tokens. The
formulas are those of :mod:`pallas_kernels.mla_prefill.blocked`.

A token's gradient is the sum over all queries that attend to it, in float32. The queries of a
sequence are added one after another: a query has no token twice, so that no addition has to be
atomic, and equal calls give equal bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.softmax import with_gradients

_QUERIES = 16  # of all sequences, whose tokens are gathered at a time


def differentiable(attend: Callable[..., Any], *, scale: float) -> Callable[..., Any]:
    """Returns ``attend``, a function of the arrays of sparse_mla_prefill, with a gradient."""
    return with_gradients(attend, functools.partial(gradients, scale=scale))


def gradients(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    latents: Float[Array, "B S CR"],
    indices: Int[Array, "B T K"],
    out: Float[Array, "B T H C"],
    lse: Float32[Array, "B T H"],
    d_out: Float[Array, "B T H C"],
    d_lse: Float32[Array, "B T H"] | None,
    *,
    scale: float,
) -> tuple[Float[Array, "B T H C"], Float[Array, "B T H R"], Float[Array, "B S CR"]]:
    """Returns the gradients of q_latent, q_rope and latents. ``d_lse`` is None if lse has none."""
    (B, T, _, C), (_, S, width) = q_latent.shape, latents.shape
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    delta = delta if d_lse is None else delta - d_lse
    lse = jnp.where(lse == -jnp.inf, 0.0, lse)  # queries without tokens: all is masked
    q = jnp.concatenate([q_latent, q_rope], axis=-1)
    n = max(1, min(_QUERIES // max(1, B), T))  # queries of each sequence in a block
    sequence = jnp.arange(B)[:, None]

    def blocks(x: jax.Array, padding: int = 0) -> jax.Array:
        widths = ((0, 0), (0, -T % n), *((0, 0),) * (x.ndim - 2))
        x = jnp.pad(x, widths, constant_values=padding)
        return jnp.moveaxis(x.reshape(B, -1, n, *x.shape[2:]), 1, 0)

    def of_queries(
        d_latents: Float32[Array, "B S CR"], block: tuple[jax.Array, ...]
    ) -> tuple[Float32[Array, "B S CR"], Float[Array, "B n H CR"]]:
        """Returns the gradient of a block of queries, and adds that of their tokens."""
        q, indices, d_out, lse, delta = block
        is_token = indices >= 0
        tokens = latents.at[sequence[..., None], indices].get(mode="clip")
        # The token that -1 leads to may contain anything, even NaN, and 0 * NaN is NaN.
        tokens = jnp.where(is_token[..., None], tokens[..., : q.shape[-1]], 0)
        scores = _product("bnhc,bnkc->bnhk", q, tokens) * scale
        p = jnp.where(is_token[:, :, None], jnp.exp(scores - lse[..., None]), 0.0)
        d_p = _product("bnhc,bnkc->bnhk", d_out, tokens[..., :C])
        d_s = (p * (d_p - delta[..., None])).astype(q.dtype)
        d_tokens = _product("bnhk,bnhc->bnkc", d_s, q) * scale
        of_values = _product("bnhk,bnhc->bnkc", p.astype(q.dtype), d_out)
        d_tokens = d_tokens.at[..., :C].add(of_values)
        # Out of bounds, so that they are dropped, and different from each other.
        targets = jnp.where(is_token, indices, S + jnp.arange(indices.shape[-1]))

        def add(i: jax.Array, d_latents: jax.Array) -> jax.Array:
            at = d_latents.at[sequence, targets[:, i], : q.shape[-1]]
            return at.add(d_tokens[:, i], mode="drop", unique_indices=True)

        d_latents = lax.fori_loop(0, n, add, d_latents, unroll=True)
        return d_latents, (_product("bnhk,bnkc->bnhc", d_s, tokens) * scale).astype(q.dtype)

    inputs = blocks(q), blocks(indices, -1), blocks(d_out), blocks(lse), blocks(delta)
    d_latents, d_q = lax.scan(of_queries, jnp.zeros((B, S, width), jnp.float32), inputs)
    d_q = jnp.moveaxis(d_q, 0, 1).reshape(B, -1, *q.shape[2:])[:, :T]
    return d_q[..., :C], d_q[..., C:], d_latents.astype(latents.dtype)


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
