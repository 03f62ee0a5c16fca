"""top_k on Hopper GPUs: radix selection, with one program per row or part of a row."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.hopper import multiprocessors, require_hopper
from pallas_kernels.top_k.mosaic_gpu_kernel import CHUNK, MAX_K, select

_WARPGROUPS = 4
# Microseconds of a program: fixed, and per score. Measured on an H200 with rows of 32,768 and
# 131,072 scores.
_FIXED_US, _SCORE_US = 21.0, 0.55e-3
_GATHER_US = 5.0  # guessed: XLA's gather of the scores of the parts' results


def top_k(
    scores: Float32[Array, "*batch S"],
    k: int,
    *,
    warpgroups: int = _WARPGROUPS,
    parts: int | None = None,
    interpret: Any = None,
) -> Int32[Array, "*batch k"]:
    """Implements :func:`pallas_kernels.top_k`.

    Args:
      warpgroups: number of warpgroups per program: 1, 2, 4 or 8. They do not affect the result.
      parts: number of parts of a row that are selected from separately, each by a program. Another
        one then selects from their results. By default :func:`parts_of`.
      interpret: parameters of Mosaic GPU's interpreter, to run without a GPU.
    """
    require_hopper(interpret)
    if k > MAX_K:
        raise NotImplementedError(f"takes k of {MAX_K} at most, got {k}")
    if 0 in scores.shape:
        raise NotImplementedError(f"takes no empty arrays, got {scores.shape}")
    *batch, S = scores.shape
    rows = jax.lax.stop_gradient(scores).reshape(-1, S)
    chosen_of = functools.partial(_chosen, k=k, warpgroups=warpgroups, interpret=interpret)
    parts = parts or parts_of(len(rows), S, k)
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


def parts_of(rows: int, S: int, k: int) -> int:
    """Returns the number of parts of a row that takes the least time.

    A few long rows leave most multiprocessors without a program.
    """

    def us(parts: int) -> float:
        if parts == 1:
            return _FIXED_US + _SCORE_US * S
        return 2 * _FIXED_US + _GATHER_US + _SCORE_US * (S / parts + parts * k)

    return min((n for n in (1, 2, 4, 8) if n == 1 or rows * n <= multiprocessors()), key=us)


def _chosen(
    rows: Float32[Array, "rows S"], *, k: int, warpgroups: int, interpret: Any
) -> Int32[Array, "rows k"]:
    # Kernels read whole chunks. Tables of 8 pages of 64 tokens or a multiple need no padding.
    padded = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % CHUNK)), constant_values=-jnp.inf)
    return select(padded, k=k, warpgroups=warpgroups, interpret=interpret)[:, :k]
