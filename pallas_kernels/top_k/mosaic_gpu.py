"""top_k on Hopper GPUs: radix selection, with a cluster of programs per row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32

from pallas_kernels.hopper import multiprocessors, require_hopper
from pallas_kernels.top_k.mosaic_gpu_kernel import CHUNK, MAX_K, WARPGROUPS, select

_MOST_PROGRAMS = 8  # of a cluster that every Hopper GPU can launch


def top_k(
    scores: Float32[Array, "*batch S"],
    k: int,
    *,
    lengths: Int[Array, "*batch"] | None = None,
    programs: int | None = None,
    interpret: Any = None,
) -> Int32[Array, "*batch k"]:
    """Implements :func:`pallas_kernels.top_k`.

    Args:
      lengths: see there.
      programs: number of programs per row: 1, 2, 4 or 8, by default :func:`plan`'s. It does not
        affect the result.
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
    padded = jnp.pad(rows, ((0, 0), (0, -S % CHUNK)), constant_values=-jnp.inf)
    programs = programs or plan(len(rows), padded.shape[1])
    lengths = None if lengths is None else lengths.reshape(-1)
    chosen = select(padded, lengths, k=k, programs=programs, interpret=interpret)
    return chosen[:, :k].reshape(*batch, k)


def plan(rows: int, S: int) -> int:
    """Returns the number of programs per row of S scores.

    As many as run at once, if each of their warpgroups has a chunk of scores.
    """
    programs = _MOST_PROGRAMS
    while programs > 1 and (
        rows * programs > multiprocessors() or programs * WARPGROUPS * CHUNK > S
    ):
        programs //= 2
    return programs
