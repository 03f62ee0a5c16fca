"""The calls that the kernel benchmark makes of each op: ours, the reference, and XLA's lowering."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from benchmarks.kernels import checks, inputs
from benchmarks.kernels.inputs import Arrays
from benchmarks.kernels.jax_timing import Call
from benchmarks.kernels.shapes import (
    LATENT,
    Case,
    Decode,
    Gradient,
    Grouped,
    Index,
    Prefill,
    PrefillGradient,
    SwigluUnderGradient,
)
from pallas_kernels.mla_prefill import gradients

MAX_PADDING = 4  # maximum size of a dense cache relative to its tokens


def call_of(case: Case, implementation: str) -> Call:
    """Returns a function that calls the case's op with that back-end."""
    if isinstance(case, Gradient):
        return functools.partial(_gradient, case, implementation)
    if isinstance(case, PrefillGradient):
        return functools.partial(_attention_gradient, case, implementation)
    if isinstance(case, SwigluUnderGradient):
        return functools.partial(_under_gradient, implementation)
    op = functools.partial(getattr(pallas_kernels, case.op), implementation=implementation)
    keywords = inputs.options(case)

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


def _under_gradient(implementation: str, arrays: Arrays) -> checks.Checked:
    def swiglu(lhs: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        sizes = arrays["group_sizes"]
        return pallas_kernels.grouped_swiglu(lhs, gate, up, sizes, implementation=implementation)

    return jax.vjp(swiglu, *(arrays[name] for name in ("lhs", "gate", "up")))[0], None


def _attention_gradient(
    case: PrefillGradient, implementation: str, arrays: Arrays
) -> checks.Checked:
    backend = gradients.BACKENDS["blocked" if implementation == "reference" else implementation]
    names = "q", "k", "v", "starts", "lengths", "first_keys", "out", "lse", "d_out"
    return backend(*map(arrays.get, names), None, **inputs.options(case)), None


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


def xla_call(case: Case) -> Call | str:
    """Returns what a JAX user would write without kernels, or the reason not to run it."""
    if isinstance(case, Grouped):
        return "XLA multiplies every row by every group's matrix"
    if isinstance(case, PrefillGradient):
        return call_of(case, "cudnn")
    if isinstance(case, Prefill):
        return "all scores at once do not fit"
    if isinstance(case, Decode):
        if case.dtype != "bf16":
            return "einsums over a quantized cache would dequantise all of it first"
        if case.rows * case.cached > MAX_PADDING * sum(case.lengths):
            return "a dense cache padded to the longest sequence would be almost empty"
        return functools.partial(_dense_decode, case)
    if case.op == "sparse_mla_prefill":
        return "too slow here: it gathers the tokens of a few queries at a time"
    return call_of(case, "blocked" if isinstance(case, Index) else "reference")


def in_order(arrays: Arrays) -> Arrays:
    """Returns the arrays with each sequence's pages contiguous and in order."""
    tables = arrays["block_tables"]
    return arrays | {
        "pages": arrays["pages"][tables.reshape(-1)],
        "block_tables": jnp.arange(tables.size, dtype=jnp.int32).reshape(tables.shape),
    }


def _dense_decode(case: Decode, arrays: Arrays) -> checks.Checked:
    """Two einsums over a dense cache, with pages in order (:func:`in_order`)."""
    B, S = case.rows, case.cached
    cache = arrays["pages"].reshape(B, -1, arrays["pages"].shape[-1])[:, :S]
    q = jnp.concatenate([arrays["q_latent"], arrays["q_rope"]], axis=-1)
    f32 = jnp.float32
    scores = jnp.einsum("bthk,bsk->bths", q, cache, preferred_element_type=f32)
    visible_count = arrays["lengths"][:, None] - case.queries + 1 + jnp.arange(case.queries)
    visible = jnp.arange(S) < visible_count[:, :, None, None]
    scores = jnp.where(visible, scores * inputs.options(case)["scale"], -jnp.inf)
    p = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum("bths,bsc->bthc", p, cache[..., :LATENT], preferred_element_type=f32)
    return out.astype(q.dtype), None
