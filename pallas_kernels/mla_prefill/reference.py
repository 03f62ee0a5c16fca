"""Reference implementation of mla_prefill: computes all scores at once, then masks them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.softmax import masked_softmax


def mla_prefill(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
    scores = jnp.einsum("bthk,bshk->bths", q, k, preferred_element_type=jnp.float32)
    s = jnp.arange(k.shape[1])
    last = starts[:, None] + jnp.arange(q.shape[1])
    mask = (s <= last[..., None]) & (s < lengths[:, None, None])
    probabilities, lse = masked_softmax(scores * scale, mask[:, :, None])
    # A masked value may be anything, even NaN: zero it, because 0 * NaN is NaN.
    v = jnp.where((s < lengths[:, None])[..., None, None], v, 0)
    out = jnp.einsum(
        "bths,bshv->bthv", probabilities.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return out.astype(q.dtype), lse
