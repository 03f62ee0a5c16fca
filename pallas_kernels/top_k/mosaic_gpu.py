"""top_k on Hopper GPUs: radix selection, with one program per row or part of a row."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.hopper import require_hopper
from pallas_kernels.top_k import cluster_kernel
from pallas_kernels.top_k.mosaic_gpu_kernel import CHUNK, MAX_K, select

_WARPGROUPS = 4


def top_k(
    scores: Float32[Array, "*batch S"],
    k: int,
    *,
    warpgroups: int = _WARPGROUPS,
    parts: int = 1,
    programs: int | None = None,
    interpret: Any = None,
) -> Int32[Array, "*batch k"]:
    """Implements :func:`pallas_kernels.top_k`.

    Args:
      warpgroups: number of warpgroups per program: 1, 2, 4 or 8. They do not affect the result.
      parts: number of parts of a row that are selected from separately, each by a program. Another
        one then selects from their results. It is for a few long rows, which leave most
        multiprocessors without a program. No GPU has run more than one part.
      programs: number of programs per row, 1, 2, 4 or 8, of the kernel in which they form a
        cluster. No GPU has run it.
      interpret: parameters of Mosaic GPU's interpreter, to run without a GPU.
    """
    require_hopper(interpret)
    if k > MAX_K:
        raise NotImplementedError(f"takes k of {MAX_K} at most, got {k}")
    if 0 in scores.shape:
        raise NotImplementedError(f"takes no empty arrays, got {scores.shape}")
    *batch, S = scores.shape
    rows = jax.lax.stop_gradient(scores).reshape(-1, S)
    if programs is not None:
        padded = jnp.pad(rows, ((0, 0), (0, -S % CHUNK)), constant_values=-jnp.inf)
        chosen = cluster_kernel.select(
            padded, k=k, warpgroups=warpgroups, programs=programs, interpret=interpret
        )
        return chosen[:, :k].reshape(*batch, k)
    chosen_of = functools.partial(_chosen, k=k, warpgroups=warpgroups, interpret=interpret)
    if parts == 1:
        return chosen_of(rows).reshape(*batch, k)
    width = -(-S // (parts * CHUNK)) * CHUNK
    rows = jnp.pad(rows, ((0, 0), (0, parts * width - S)), constant_values=-jnp.inf)
    of_parts = chosen_of(rows.reshape(-1, width)).reshape(-1, parts, k)
    # In the order of the row, so that ties go to the lower index here too.
    index = jnp.where(of_parts < 0, -1, of_parts + width * jnp.arange(parts)[:, None])
    index = index.reshape(-1, parts * k)
    best = jnp.take_along_axis(rows, jnp.maximum(index, 0), axis=1)
    of_all = chosen_of(jnp.where(index < 0, -jnp.inf, best))
    chosen = jnp.take_along_axis(index, jnp.maximum(of_all, 0), axis=1)
    return jnp.where(of_all < 0, -1, chosen).reshape(*batch, k)


def _chosen(
    rows: Float32[Array, "rows S"], *, k: int, warpgroups: int, interpret: Any
) -> Int32[Array, "rows k"]:
    # Kernels read whole chunks. Tables of 8 pages of 64 tokens or a multiple need no padding.
    padded = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % CHUNK)), constant_values=-jnp.inf)
    return select(padded, k=k, warpgroups=warpgroups, interpret=interpret)[:, :k]
