"""Choice among mla_decode's kernels for Hopper GPUs, and the schedule of a step.

They take bfloat16 queries, pages of 64 tokens, latent width 512 and rope width 64:

=========================== ==================== =============================================
query rows (T * H)          bfloat16 cache       float8 cache
=========================== ==================== =============================================
8 to 32, a multiple of 8    :mod:`few_queries`   :mod:`scored`
more                        :mod:`dense`         :mod:`float8`
=========================== ==================== =============================================

:mod:`merge` then merges the parts of split sequences.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.hopper import multiprocessors, require_hopper
from pallas_kernels.hopper.split_kv import BLOCK, Costs, Parts, Schedule, schedule
from pallas_kernels.mla_decode import dense, few_queries, float8, scored
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE, TOKEN_BYTES
from pallas_kernels.mla_decode.merge import merge_partials
from pallas_kernels.mla_decode.row_tiles import TILE

FEW_ROWS = 32  # most query rows of the kernels whose matmuls are transposed

FEW_ROWS_COSTS = Costs(merge=1, partials=2, min_blocks=2)
"""Cost model of the schedule for few query rows, derived for 16 of them.

A key block takes 2.2 us of a multiprocessor's share of HBM bandwidth and a merge takes two memory
latencies. The partial results of all partitions are 9 MB to write and read. Two blocks of a
partition are processed concurrently. By this arithmetic a sequence costs nothing, because its
prologue and epilogue overlap with fetching the next one; measured, a cost of 2 is better than 1."""


def mla_decode(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page bytes"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    schedule: Schedule | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    """Implements :func:`pallas_kernels.mla_decode`. Not batch-invariant in the last bit: the
    lengths of the other sequences decide where a sequence is split."""
    (B, T, H, C), M = q_latent.shape, q_latent.shape[1] * q_latent.shape[2]
    arrays = q_latent, q_rope, pages, block_tables, lengths
    parts, lse = mla_decode_parts(*arrays, scale=scale, schedule=schedule, interpret=interpret)
    out, lse = merge_partials(
        parts.out, lse, parts.partials, parts.lse, parts.split_sequences, interpret=interpret
    )
    return out[:, :M].reshape(B, T, H, C), lse[:, :M].reshape(B, T, H)


def mla_decode_parts(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page bytes"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    schedule: Schedule | None = None,
    interpret: Any = None,
) -> tuple[Parts, Float32[Array, "B rows"]]:
    """Implements :func:`pallas_kernels.mla_decode_parts`. See :func:`mla_decode`."""
    require_hopper(interpret)
    B, T, H, C = q_latent.shape
    is_float8 = pages.dtype == jnp.uint8
    dtypes = {str(x.dtype) for x in (q_latent, q_rope, *([] if is_float8 else [pages]))}
    if dtypes != {"bfloat16"}:
        raise NotImplementedError(f"takes bfloat16, got {', '.join(sorted(dtypes))}")
    widths = (pages.shape[1], C, q_rope.shape[-1])
    if widths != (BLOCK, LATENT, ROPE):
        raise NotImplementedError(
            f"takes pages of {BLOCK} tokens, {LATENT} latent and {ROPE} rope columns, got {widths}"
        )
    width, unit = (TOKEN_BYTES, "bytes") if is_float8 else (LATENT + ROPE, "columns")
    if pages.shape[2] != width:
        raise NotImplementedError(f"takes tokens of {width} {unit}, got {pages.shape[2]}")
    M = T * H
    if M % 8 and M < TILE:
        raise NotImplementedError(f"takes T * H of {TILE} or more, or a multiple of 8, got {M}")
    if scale < 0:
        raise NotImplementedError(f"takes a scale of 0 or more, got {scale}")
    if schedule is None:
        schedule = make_schedule(lengths, queries=T, heads=H, max_pages=block_tables.shape[1])
    if M <= FEW_ROWS:
        kernel = scored.attend if is_float8 else few_queries.attend
    else:
        kernel = float8.attend if is_float8 else dense.attend
    # Pad to whole tiles of query rows, unless there is only one tile.
    padding = ((0, 0), (0, -M % TILE if M > TILE else 0), (0, 0))
    rows = [jnp.pad(q.reshape(B, M, -1), padding) for q in (q_latent, q_rope)]
    arrays: Any = *rows, pages, block_tables.astype(jnp.int32), schedule
    scale = max(scale, 1e-30)  # not 0: masked scores are -inf, and 0 * -inf is NaN
    options: Any = {"queries": T, "heads": H, "scale": scale, "interpret": interpret}
    out, lse, (partials, partial_lse) = kernel(*arrays, **options)
    return Parts(out, partials, partial_lse, schedule.split_sequences), lse


def make_schedule(
    lengths: Int[Array, " B"], *, queries: int, heads: int, max_pages: int
) -> Schedule:
    """Makes the schedule whose partitions fill the default device once.

    It depends only on the lengths, so one schedule serves all layers of a step.

    Args:
      lengths: cached tokens per sequence, including its queries.
      queries: number of query tokens T per sequence.
      heads: number of heads H.
      max_pages: width of the block table.
    """
    tiles = -(-queries * heads // TILE)
    partitions = max(1, multiprocessors() // tiles)
    costs = FEW_ROWS_COSTS if queries * heads <= FEW_ROWS else Costs()
    return schedule(lengths, max_pages=max_pages, partitions=partitions, costs=costs)
