"""whole_layer on Hopper GPUs: one persistent kernel. benchmarks/NOTES.md has its times."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.attention_inputs import mosaic_gpu as before_attention
from pallas_kernels.attention_inputs.plan import Config as BeforeConfig
from pallas_kernels.attention_inputs.reference import AttentionWeights
from pallas_kernels.decoder_layer import mosaic_gpu as after_attention
from pallas_kernels.decoder_layer.plan import Config as AfterConfig
from pallas_kernels.decoder_layer.plan import packs
from pallas_kernels.hopper import multiprocessors, require_hopper
from pallas_kernels.hopper.grid_barrier import new_counter
from pallas_kernels.route.reference import Rule
from pallas_kernels.whole_layer import kernel
from pallas_kernels.whole_layer.attention import Sizes
from pallas_kernels.whole_layer.plan import Config, Plan
from pallas_kernels.whole_layer.reference import Cached, LayerOutput, LayerWeights


def whole_layer(
    x: Float[Array, "T D"],
    before: AttentionWeights,
    after: LayerWeights,
    cos: Float32[Array, "T half"],
    sin: Float32[Array, "T half"],
    cached: Cached,
    *,
    scale: float,
    eps: float,
    latent_eps: float,
    after_eps: float,
    rule: Rule | None,
    config: Config | None = None,
    counter: Any = None,
    interpret: Any = None,
) -> LayerOutput:
    """Implements :func:`pallas_kernels.whole_layer.api.whole_layer`.

    Args:
      counter: see :func:`pallas_kernels.decoder_layer.mosaic_gpu.feed_forward`.

    Raises:
      NotImplementedError: no Hopper GPU; more than one token; heads that are not a multiple of 16;
        pages that are not of 64 tokens, or a block table of more than 8,192 positions; what
        attention_inputs or feed_forward refuses; or too little shared memory.
    """
    require_hopper(interpret)
    if config is None:
        programs = multiprocessors() if interpret is None else 2
        dtypes = [before.kv_a_proj.weight.dtype, after.o_proj.weight.dtype]
        config = Config(programs, packed=packs(len(x), x.dtype, *dtypes))
    plan = make_plan(
        x, before, after, cos, cached, scale=scale, eps=eps, latent_eps=latent_eps,
        after_eps=after_eps, rule=rule, config=config, interpret=interpret,
    )  # fmt: skip
    if counter is None and interpret is None:
        counter = jax.new_ref(new_counter())
    slots, table, start = (each.astype(jnp.int32) for each in cached[1:])
    cached = Cached(cached.pages, slots, table, start)
    made: Any = kernel.whole_layer(
        x, before, after, cos, sin, cached, counter, plan=plan, interpret=interpret
    )
    return made[0]


def make_plan(
    x: Float[Array, "T D"],
    before: AttentionWeights,
    after: LayerWeights,
    cos: Float32[Array, "T half"],
    cached: Cached,
    *,
    scale: float,
    eps: float,
    latent_eps: float,
    after_eps: float,
    rule: Rule | None,
    config: Config,
    interpret: Any = None,
) -> Plan:
    """Returns the plan for these arguments. It raises as :func:`whole_layer`."""
    # Two tokens are not verified: the check of the machine code finds a load, of the second one's
    # query, that is not finished where a stage of weights is released.
    if len(x) != 1:
        raise NotImplementedError(f"takes 1 token, got {len(x)}")
    H, _, C = before.w_uk.shape
    _, page, columns = cached.pages.shape
    sizes = Sizes(len(x), H, C, 2 * cos.shape[1], max(scale, 1e-30), config.programs)
    sizes.check(page, columns, len(cached.table) * page, interpret)
    settings: dict[str, Any] = {"programs": config.programs, "packed": config.packed}
    # The plans are made for a ring of their own, which need not fit with the other's memory.
    plan_before = before_attention.make_plan(
        x, before, cos, cached.pages, eps=eps, latent_eps=latent_eps,
        config=BeforeConfig(**settings), interpret=interpret,
    )  # fmt: skip
    plan_after = after_attention.make_plan(
        x, after.router, after.shared, after.routed, rule=rule, eps=after_eps,
        o_proj=after.o_proj, w_uv=after.w_uv, sequences=1,
        config=AfterConfig(**settings, timed=config.timed),
        interpret=interpret,
    )  # fmt: skip
    return Plan.of(plan_before, plan_after, sizes, config, interpret)
