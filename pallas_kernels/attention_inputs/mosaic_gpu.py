"""attention_inputs on Hopper GPUs, for one to eight tokens: one persistent kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.attention_inputs import kernel
from pallas_kernels.attention_inputs.kernel import Plan
from pallas_kernels.attention_inputs.reference import AttentionInputs, AttentionWeights
from pallas_kernels.decoder_layer.registers import ROWS
from pallas_kernels.decoder_layer.stream import weight_dtype_of
from pallas_kernels.hopper import multiprocessors, require_hopper
from pallas_kernels.hopper.grid_barrier import new_counter

_INTERPRETED_CTAS = 2


def attention_inputs(
    x: Float[Array, "M D"],
    weights: AttentionWeights,
    cos: Float32[Array, "M half"],
    sin: Float32[Array, "M half"],
    pages: Float[Array, "P page width"],
    slots: Int[Array, " M"],
    *,
    eps: float,
    latent_eps: float,
    counter: Any = None,
    interpret: Any = None,
) -> AttentionInputs:
    """Implements :func:`pallas_kernels.attention_inputs`.

    Args:
      counter: see :func:`pallas_kernels.decoder_layer.mosaic_gpu.feed_forward`.

    Raises:
      NotImplementedError: no Hopper GPU; more than 8 tokens, or 4 for float8 projections;
        activations, pages or W_UK that are not bfloat16; projections that are neither all bfloat16,
        nor all float8, int8 or int4 with scales; widths that are not multiples of 128, or rope
        widths and columns of pages that are not multiples of 8; or too little shared memory.
    """
    require_hopper(interpret)
    allowed = {jnp.dtype(jnp.bfloat16)} | ({jnp.dtype(jnp.float32)} if interpret else set())
    if x.dtype not in allowed or {weights.w_uk.dtype, pages.dtype} != {x.dtype}:
        raise NotImplementedError(
            f"takes bfloat16 activations, W_UK and pages, got {x.dtype}, {weights.w_uk.dtype} and"
            f" {pages.dtype}"
        )
    projections = [weights.q_proj, weights.kv_a_proj]
    projections += [] if weights.q_a_proj is None else [weights.q_a_proj]
    H, N, C = weights.w_uk.shape
    plan = Plan.of(
        ctas=multiprocessors() if interpret is None else _INTERPRETED_CTAS,
        tokens=x.shape[0],
        width=x.shape[1],
        q_rank=0 if weights.q_a_proj is None else weights.q_a_proj.weight.shape[0],
        rope=2 * cos.shape[1],
        heads=H,
        nope=N,
        rank=C,
        eps=eps,
        latent_eps=latent_eps,
        dtype=jnp.dtype(x.dtype),
        weight_dtype=weight_dtype_of(projections, x.dtype),
        interpret=interpret,
    )
    if pages.shape[2] % ROWS:
        raise NotImplementedError(
            f"takes pages with a multiple of {ROWS} columns, got {pages.shape[2]}"
        )
    if counter is None and interpret is None:
        counter = jax.new_ref(new_counter())
    slots = slots.astype(jnp.int32)
    arrays = {"x": x, "weights": weights, "cos": cos, "sin": sin, "slots": slots}
    made: Any = kernel.attention_inputs(arrays, pages, counter, plan=plan, interpret=interpret)
    return AttentionInputs(*made)
