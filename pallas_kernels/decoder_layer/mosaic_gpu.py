"""feed_forward on Hopper GPUs: one persistent kernel."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.decoder_layer import kernel
from pallas_kernels.decoder_layer.plan import Plan
from pallas_kernels.decoder_layer.reference import (
    Chosen,
    Matrices,
    Projection,
    Router,
    is_integer,
    shape_of,
)
from pallas_kernels.hopper import multiprocessors, require_hopper
from pallas_kernels.hopper.grid_barrier import new_counter
from pallas_kernels.mla_decode.parts import Parts
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
        weight_dtype=_weight_dtype(h, router, shared, routed, o_proj, w_uv, interpret),
        interpret=interpret,
    )
    if counter is None and interpret is None:
        counter = jax.new_ref(new_counter())
    arrays = {"h": h, "norm": norm, "router": router, "shared": shared, "routed": routed}
    arrays |= {"attended": attended, "o_proj": o_proj, "w_uv": w_uv}
    made: Any = kernel.feed_forward(arrays, counter, plan=plan, interpret=interpret)
    return made


def _weight_dtype(
    h: Array, router: Router | None, shared: Matrices | None, routed: Matrices | None,
    o_proj: Projection | None, w_uv: Array | None, interpret: Any,
) -> Any:  # fmt: skip
    """Returns the dtype of all matrices but the router and W_UV. It raises as the operation."""
    matrices = [each for each in (shared, routed) if each is not None]
    dtypes = {jnp.dtype(matrix.dtype) for each in matrices for matrix in each[:3]}
    if o_proj is not None:
        dtypes.add(jnp.dtype(o_proj.weight.dtype))
    (weight_dtype,) = dtypes if len(dtypes) == 1 else (None,)
    router_dtype = h.dtype if router is None else router.weight.dtype
    is_scaled = weight_dtype is not None and (
        weight_dtype == jnp.dtype(FLOAT8) or is_integer(weight_dtype)
    )
    allowed = {jnp.dtype(jnp.bfloat16)} | ({jnp.dtype(jnp.float32)} if interpret else set())
    if h.dtype not in allowed or router_dtype != h.dtype:
        raise NotImplementedError(
            f"takes bfloat16 activations and routers, got {h.dtype} and {router_dtype}"
        )
    if weight_dtype != h.dtype and not is_scaled:
        names = ", ".join(sorted(map(str, dtypes)))
        raise NotImplementedError(
            f"takes matrices of one of {h.dtype}, float8_e4m3fn, int8 and int4, got {names}"
        )
    if w_uv is not None and w_uv.dtype != h.dtype:
        raise NotImplementedError(f"takes W_UV of {h.dtype}, got {w_uv.dtype}")
    scales = [len(each.scales) // 3 for each in matrices]
    if is_scaled and not all([*scales, o_proj is None or o_proj.scales]):
        raise NotImplementedError(f"takes {weight_dtype} matrices with scales, got none")
    return weight_dtype
