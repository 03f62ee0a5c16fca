"""The call of each op that the kernel benchmark makes, and its planned arguments."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from benchmarks.kernels import checks, inputs, layer_inputs
from benchmarks.kernels.inputs import Arrays
from benchmarks.kernels.jax_timing import Call
from benchmarks.kernels.layer_shapes import FeedForward
from benchmarks.kernels.shapes import Case, Decode, Gradient
from benchmarks.kernels.variants import VARIANTS, variant_of


def call_of(case: Case, implementation: str) -> Call:
    """Returns a function that calls the case's op.

    Args:
      implementation: a back-end's name, or that of one of :data:`variants.VARIANTS`.
    """
    if isinstance(case, FeedForward) and implementation not in VARIANTS:
        return layer_inputs.call(case, implementation)
    if isinstance(case, Gradient) and implementation not in VARIANTS:
        return functools.partial(_gradient, case, implementation)
    keywords = inputs.options(case)
    if implementation in VARIANTS:
        op = variant_of(case, implementation)
    else:
        op = getattr(pallas_kernels, case.op)
        keywords = keywords | {"implementation": implementation}

    def call(arrays: Arrays) -> checks.Checked:
        out = op(**arrays, **keywords)
        return out if isinstance(out, tuple) else (out, None)

    return call


def _gradient(case: Gradient, implementation: str, arrays: Arrays) -> checks.Checked:
    """Differentiates grouped_matmul. It is linear in each operand, so zeros stand for the one that
    the gradient does not depend on, and XLA removes the forward pass."""
    sizes, d_out = arrays["group_sizes"], arrays["d_out"]
    lhs = arrays.get("lhs", jnp.zeros((len(d_out), case.K), jnp.bfloat16))
    rhs = arrays.get("rhs", jnp.zeros((len(sizes), case.N, case.K), jnp.bfloat16))

    def matmul(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return pallas_kernels.grouped_matmul(lhs, rhs, sizes, implementation=implementation)

    _, vjp = jax.vjp(matmul, lhs, rhs)
    return vjp(d_out)[case.of == "matrices"], None


def plan(case: Case, arrays: Arrays) -> dict[str, Any]:
    """Returns additional arguments of the op that a model computes once per step for all layers."""
    if not isinstance(case, Decode):
        return {}
    queries, heads = arrays["q_latent"].shape[1:3]
    made = pallas_kernels.mla_decode_schedule(
        arrays["lengths"],
        queries=queries,
        heads=heads,
        max_pages=arrays["block_tables"].shape[1],
    )
    return {"schedule": made}
