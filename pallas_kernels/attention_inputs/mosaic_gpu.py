"""attention_inputs on Hopper GPUs, for one to eight tokens: one persistent kernel.

benchmarks/NOTES.md has its times.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.attention_inputs import kernel
from pallas_kernels.attention_inputs.plan import Config, PhaseName, Plan
from pallas_kernels.attention_inputs.reference import AttentionInputs, AttentionWeights
from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.decoder_layer.formats import is_integer
from pallas_kernels.decoder_layer.plan import packs
from pallas_kernels.decoder_layer.stream import ROWS
from pallas_kernels.hopper import multiprocessors, require_hopper
from pallas_kernels.hopper.grid_barrier import new_counter


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
    config: Config | None = None,
    counter: Any = None,
    interpret: Any = None,
) -> AttentionInputs:
    """Implements :func:`pallas_kernels.attention_inputs`.

    Args:
      counter: see :func:`pallas_kernels.decoder_layer.mosaic_gpu.feed_forward`.

    Raises:
      NotImplementedError: no Hopper GPU; more than 8 tokens; activations, pages or W_UK that are
        not bfloat16; projections that are neither bfloat16, nor float8, int8 or int4 with scales;
        widths that are not multiples of 128, or rope widths and columns of pages that are not
        multiples of 8; or too little shared memory.
    """
    require_hopper(interpret)
    programs = multiprocessors() if interpret is None else 2
    if config is None:
        dtypes = _weight_dtypes(weights).values()
        config = Config(programs, packed=packs(len(x), x.dtype, *dtypes))
    options = {"eps": eps, "latent_eps": latent_eps, "config": config}
    plan = make_plan(x, weights, cos, pages, **options, interpret=interpret)
    if counter is None and interpret is None:
        counter = jax.new_ref(new_counter())
    made: Any = kernel.attention_inputs(
        x, weights, cos, sin, pages, slots.astype(jnp.int32), counter, plan=plan,
        interpret=interpret,
    )  # fmt: skip
    return AttentionInputs(*made)


def make_plan(
    x: Float[Array, "M D"],
    weights: AttentionWeights,
    cos: Float32[Array, "M half"],
    pages: Float[Array, "P page width"],
    *,
    eps: float,
    latent_eps: float,
    config: Config,
    interpret: Any = None,
) -> Plan:
    """Returns the plan for these arguments. It raises as :func:`attention_inputs`."""
    allowed = {jnp.dtype(jnp.bfloat16)} | ({jnp.dtype(jnp.float32)} if interpret else set())
    if x.dtype not in allowed or {weights.w_uk.dtype, pages.dtype} != {x.dtype}:
        raise NotImplementedError(
            f"takes bfloat16 activations, W_UK and pages, got {x.dtype}, {weights.w_uk.dtype} and"
            f" {pages.dtype}"
        )
    dtypes = _weight_dtypes(weights)
    for name, dtype in dtypes.items():
        is_scaled = dtype == jnp.dtype(FLOAT8) or is_integer(dtype)
        if dtype != x.dtype and not (is_scaled and getattr(weights, name).scales):
            raise NotImplementedError(
                f"takes projections of {x.dtype}, or float8_e4m3fn, int8 or int4 with scales, got"
                f" {dtype}"
            )
    H, N, C = weights.w_uk.shape
    plan = Plan.of(
        tokens=x.shape[0],
        width=x.shape[1],
        q_rank=0 if weights.q_a_proj is None else weights.q_a_proj.weight.shape[0],
        rope=2 * cos.shape[1],
        w_uk=(H, N, C),
        weight_dtypes=dtypes,
        eps=eps,
        latent_eps=latent_eps,
        dtype=x.dtype,
        config=config,
        interpret=interpret,
    )
    if pages.shape[2] % ROWS:
        raise NotImplementedError(
            f"takes pages with a multiple of {ROWS} columns, got {pages.shape[2]}"
        )
    return plan


def _weight_dtypes(weights: AttentionWeights) -> dict[PhaseName, Any]:
    """Returns the dtypes of the projections, by name."""
    names: tuple[PhaseName, ...] = "q_proj", "kv_a_proj", "q_a_proj"
    dtypes: dict[PhaseName, Any] = {}
    for name in names:
        if (projection := getattr(weights, name)) is not None:
            dtypes[name] = projection.weight.dtype
    return dtypes
