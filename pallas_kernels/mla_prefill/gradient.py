"""Gradient of mla_prefill's kernels. It is the reference's, which computes all scores at once."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels.mla_prefill import reference

Attention = Callable[..., tuple[jax.Array, jax.Array]]


def with_gradient_of_reference(attend: Attention, scale: float) -> Attention:
    """Makes ``attend(q, k, v, starts, lengths)`` differentiable in q, k and v."""

    @jax.custom_vjp
    def attention(*inputs: jax.Array):
        return attend(*inputs)

    def forward(*inputs: jax.Array):
        return attend(*inputs), inputs

    def backward(inputs, cotangents):
        *qkv, starts, lengths = inputs

        def of_qkv(q, k, v):
            return reference.mla_prefill(q, k, v, starts, lengths, scale=scale)

        return *jax.vjp(of_qkv, *qkv)[1](cotangents), None, None

    attention.defvjp(forward, backward)
    return attention
