"""XLA's lowering of each op, as a JAX user would write it without kernels: a peer of ours."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from benchmarks.kernels import checks, inputs
from benchmarks.kernels.calls import call_of
from benchmarks.kernels.inputs import Arrays
from benchmarks.kernels.jax_timing import Call
from benchmarks.kernels.layer_shapes import FeedForward
from benchmarks.kernels.report import EVERY_GROUP
from benchmarks.kernels.shapes import LATENT, Case, Decode, Gradient, Index, Prefill, SparseCase

MAX_PADDING = 4  # maximum size of a dense cache relative to its tokens


def xla_call(case: Case) -> Call | str:
    """Returns what a JAX user would write without kernels, or the reason not to run it."""
    if isinstance(case, Decode):
        if case.dtype != "bf16":
            return "einsums over a quantized cache would dequantise all of it first"
        if case.rows * case.cached > MAX_PADDING * sum(case.lengths):
            return "a dense cache padded to the longest sequence would be almost empty"
        return functools.partial(_dense_decode, case)
    if isinstance(case, Prefill):
        return "all scores at once do not fit"
    if isinstance(case, FeedForward):
        return call_of(case, "reference")
    if isinstance(case, Index):
        return call_of(case, "blocked")
    if isinstance(case, SparseCase):
        if case.op == "sparse_mla_prefill":
            return "too slow here: it gathers the tokens of a few queries at a time"
        return call_of(case, "reference")
    if isinstance(case, Gradient):
        return f"does not fit: {EVERY_GROUP}"
    if case.M * len(case.sizes) * case.columns * case.K > 4e12:
        return f"too slow here: {EVERY_GROUP}"
    if case.dtype != "bf16" and len(case.sizes) * case.columns * case.K > 2e9:
        return "dequantised matrices do not fit"
    return call_of(case, "reference")


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
