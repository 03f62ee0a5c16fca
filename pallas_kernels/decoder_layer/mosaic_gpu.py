"""feed_forward on Hopper GPUs: one persistent kernel."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.decoder_layer import kernel
from pallas_kernels.decoder_layer.plan import Plan
from pallas_kernels.decoder_layer.reference import (
    Chosen,
    Matrices,
    Projection,
    Router,
    shape_of,
)
from pallas_kernels.decoder_layer.stream import weight_dtype_of
from pallas_kernels.hopper import multiprocessors, require_hopper
from pallas_kernels.hopper.grid_barrier import new_counter
from pallas_kernels.hopper.split_kv import Parts
from pallas_kernels.route.reference import Rule

_INTERPRETED_CTAS = 2


def feed_forward(
    h: Float[Array, "M D"],
    norm: Float[Array, " D"],
    router: Router | None,
    shared: Matrices | None,
    routed: Matrices | None,
    *,
    rule: Rule | None,
    eps: float,
    attended: Float[Array, "M _"] | Parts | None = None,
    o_proj: Projection | None = None,
    w_uv: Float[Array, "H V C"] | None = None,
    counter: Any = None,
    interpret: Any = None,
) -> tuple[Float[Array, "M D"], Chosen | None]:
    """Implements :func:`pallas_kernels.feed_forward`.

    Args:
      counter: Ref of the grid barrier's counter, ``jax.new_ref(new_counter())``, which all kernels
        of a program should share: XLA then neither fills it for each kernel nor runs two of them at
        the same time. None makes one for this call.

    Raises:
      NotImplementedError: no Hopper GPU; more than 8 tokens, or 4 for float8 matrices; activations
        that are not bfloat16; matrices that are neither bfloat16, nor float8, int8 or int4 with
        scales; widths that are not multiples of 128; what :func:`pallas_kernels.route` refuses on
        Hopper; or too little shared memory.
    """
    require_hopper(interpret)
    router_dtype = h.dtype if router is None else router.weight.dtype
    allowed = {jnp.dtype(jnp.bfloat16)} | ({jnp.dtype(jnp.float32)} if interpret else set())
    if h.dtype not in allowed or router_dtype != h.dtype:
        raise NotImplementedError(
            f"takes bfloat16 activations and routers, got {h.dtype} and {router_dtype}"
        )
    if w_uv is not None and w_uv.dtype != h.dtype:
        raise NotImplementedError(f"takes W_UV of {h.dtype}, got {w_uv.dtype}")
    matrices = [(m, each.scales) for each in (shared, routed) if each for m in each[:3]]
    matrices += [] if o_proj is None else [o_proj]
    plan = Plan.of(
        ctas=multiprocessors() if interpret is None else _INTERPRETED_CTAS,
        tokens=h.shape[0],
        width=h.shape[1],
        attention=0 if o_proj is None else shape_of(o_proj.weight)[1],
        heads=0 if w_uv is None else w_uv.shape[0],
        latent=0 if w_uv is None else w_uv.shape[2],
        sequences=len(attended.out) if isinstance(attended, Parts) else 0,
        ffn=0 if shared is None else shared.gate.shape[-2],
        expert_ffn=0 if routed is None else routed.gate.shape[-2],
        experts=0 if routed is None else math.prod(routed.gate.shape[:-2]),
        rule=rule,
        eps=eps,
        dtype=jnp.dtype(h.dtype),
        weight_dtype=weight_dtype_of(matrices, h.dtype),
        interpret=interpret,
    )
    if counter is None and interpret is None:
        counter = jax.new_ref(new_counter())
    arrays = {"h": h, "norm": norm, "router": router, "shared": shared, "routed": routed}
    arrays |= {"attended": attended, "o_proj": o_proj, "w_uv": w_uv}
    made: Any = kernel.feed_forward(arrays, counter, plan=plan, interpret=interpret)
    return made
