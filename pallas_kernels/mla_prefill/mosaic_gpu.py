"""mla_prefill on Hopper GPUs (Pallas Mosaic GPU): bfloat16, widths in multiples of 64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.hopper import require_hopper
from pallas_kernels.mla_prefill.gradient import with_gradient_of_reference
from pallas_kernels.mla_prefill.kernel import attend
from pallas_kernels.mla_prefill.plan import COLUMNS, Config

_ROWS_PER_COPY = 8
"""TMA tiles queries and keys in groups of this many."""


def mla_prefill(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
    """Implements :func:`pallas_kernels.mla_prefill`. Its gradient is the reference's.

    Args:
      config: tile sizes and scheduling.
      interpret: parameters of Mosaic GPU's interpreter, to run without a GPU.
    """
    require_hopper(interpret)
    arrays = {"q": q, "k": k, "v": v}
    if wrong := {name: x.dtype.name for name, x in arrays.items() if x.dtype != jnp.bfloat16}:
        raise NotImplementedError(f"takes bfloat16, got {wrong}")
    K, V = q.shape[-1], v.shape[-1]
    if K % COLUMNS or V % COLUMNS or not 0 < V <= min(K, 128) or K > 192:
        raise NotImplementedError(
            "takes keys 64, 128 or 192 wide and values 64 or 128 wide, no wider than the keys,"
            f" got {K} and {V}"
        )
    if scale <= 0:
        raise NotImplementedError(f"takes a positive scale, got {scale}")
    if 0 in q.shape or 0 in k.shape:
        raise NotImplementedError(f"takes no empty arrays, got q {q.shape} and k {k.shape}")
    attention = functools.partial(
        _attend, scale=float(scale), config=config or Config(), interpret=interpret
    )
    return with_gradient_of_reference(attention, scale)(q, k, v, starts, lengths)


def _attend(q, k, v, starts, lengths, *, scale: float, config: Config, interpret: Any):
    T = q.shape[1]
    q, k, v = (_pad_tokens(x) for x in (q, k, v))
    starts, lengths = starts.astype(jnp.int32), lengths.astype(jnp.int32)
    out, lse = attend(q, k, v, starts, lengths, scale=scale, config=config, interpret=interpret)
    return out[:, :T], lse[:, :, :T].swapaxes(1, 2)


def _pad_tokens(x: jax.Array) -> jax.Array:
    """Pads the token dimension to a multiple of _ROWS_PER_COPY."""
    missing = -x.shape[1] % _ROWS_PER_COPY
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x
