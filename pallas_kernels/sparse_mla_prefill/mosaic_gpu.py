"""sparse_mla_prefill on Hopper GPUs: sparse_mla_decode's kernel, with each sequence one page."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.dispatch import with_gradients_of
from pallas_kernels.sparse_mla_decode import mosaic_gpu as decode
from pallas_kernels.sparse_mla_prefill import reference


def sparse_mla_prefill(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    latents: Float[Array, "B S CR"],
    indices: Int[Array, "B T K"],
    *,
    scale: float,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    """Implements :func:`pallas_kernels.sparse_mla_prefill`. Its gradient is the reference's.

    Args:
      interpret: parameters of Mosaic GPU's interpreter, to run without a GPU.
    """
    one_page_each = jnp.arange(len(latents), dtype=jnp.int32)[:, None]

    def attend(q_latent, q_rope, latents, indices):
        # No prefetch: queries of the same sequence have brought most tokens into the L2 cache.
        return decode.sparse_mla_decode(
            q_latent, q_rope, latents, one_page_each, indices, scale=scale, prefetch=False,
            interpret=interpret,
        )  # fmt: skip

    exact = functools.partial(reference.sparse_mla_prefill, scale=scale)
    return with_gradients_of(exact, attend)(q_latent, q_rope, latents, indices)
