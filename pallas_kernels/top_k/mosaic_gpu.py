"""top_k on Hopper GPUs: radix selection, with one program per row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.hopper import require_hopper
from pallas_kernels.top_k.mosaic_gpu_kernel import CHUNK, MAX_K, select

_WARPGROUPS = 4


def top_k(
    scores: Float32[Array, "*batch S"],
    k: int,
    *,
    warpgroups: int = _WARPGROUPS,
    interpret: Any = None,
) -> Int32[Array, "*batch k"]:
    """Implements :func:`pallas_kernels.top_k`.

    Args:
      warpgroups: number of warpgroups per row: 1, 2, 4 or 8. They do not affect the result.
      interpret: parameters of Mosaic GPU's interpreter, to run without a GPU.
    """
    require_hopper(interpret)
    if k > MAX_K:
        raise NotImplementedError(f"takes k of {MAX_K} at most, got {k}")
    if 0 in scores.shape:
        raise NotImplementedError(f"takes no empty arrays, got {scores.shape}")
    *batch, S = scores.shape
    rows = jax.lax.stop_gradient(scores).reshape(-1, S)
    # Kernels read whole chunks. Tables of 8 pages of 64 tokens or a multiple need no padding.
    rows = jnp.pad(rows, ((0, 0), (0, -S % CHUNK)), constant_values=-jnp.inf)
    chosen = select(rows, k=k, warpgroups=warpgroups, interpret=interpret)
    return chosen[:, :k].reshape(*batch, k)
