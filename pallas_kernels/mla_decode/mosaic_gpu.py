"""mla_decode on Hopper GPUs: bfloat16 queries, pages of 64 tokens, latent width 512, rope width 64.

There are five kernels. Two take few query rows (T * H): :mod:`few_queries_kernel` up to 32, over a
bfloat16 cache or the float8 cache of :mod:`float8_cache`, and :mod:`scored_kernel` over the latter.
With more query rows, in tiles of 64, :mod:`kernel` reads a bfloat16 cache. A float8 cache is read
by :mod:`float8_pairs_kernel` if the number of tiles is even, as with 128 heads, and by
:mod:`float8_kernel` otherwise. ``config`` may select :mod:`scored_kernel` or
:mod:`float8_pairs_kernel` for any number of query rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.hopper import multiprocessors, require_hopper
from pallas_kernels.mla_decode import (
    few_queries_kernel,
    float8_kernel,
    float8_pairs_kernel,
    scored_kernel,
)
from pallas_kernels.mla_decode.few_queries_plan import MAX_QUERY_ROWS, FewQueries
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE, TOKEN_BYTES
from pallas_kernels.mla_decode.float8_pairs_plan import Float8Pairs
from pallas_kernels.mla_decode.kernel import attend
from pallas_kernels.mla_decode.kernel_parts import TILE
from pallas_kernels.mla_decode.merge_kernel import merge_partials
from pallas_kernels.mla_decode.parts import Parts
from pallas_kernels.mla_decode.plan import Config
from pallas_kernels.mla_decode.schedule import BLOCK, FEW_QUERIES_COSTS, Costs, Schedule, schedule
from pallas_kernels.mla_decode.scored_plan import MAX_ROWS, ScoredQueries


def mla_decode(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page bytes"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    schedule: Schedule | None = None,
    config: Config | FewQueries | ScoredQueries | Float8Pairs | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    """Implements :func:`pallas_kernels.mla_decode`.

    The last rounding of a sequence's result may depend on the lengths of the other sequences,
    because they decide where it is split.

    Args:
      config: tuning parameters. Their class selects the kernel; by default the number of query rows
        does.
      interpret: parameters of Mosaic GPU's interpreter, to run without a GPU.
    """
    (B, T, H, C), M = q_latent.shape, q_latent.shape[1] * q_latent.shape[2]
    arrays = q_latent, q_rope, pages, block_tables, lengths
    options = {"scale": scale, "schedule": schedule, "config": config, "interpret": interpret}
    parts, lse = mla_decode_parts(*arrays, **options)
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
    config: Config | FewQueries | ScoredQueries | Float8Pairs | None = None,
    interpret: Any = None,
) -> tuple[Parts, Float32[Array, "B rows"]]:
    """Implements :func:`pallas_kernels.mla_decode_parts`. See :func:`mla_decode`."""
    require_hopper(interpret)
    B, T, H, C = q_latent.shape
    float8 = pages.dtype == jnp.uint8
    dtypes = {str(x.dtype) for x in (q_latent, q_rope, *([] if float8 else [pages]))}
    if dtypes != {"bfloat16"}:
        raise NotImplementedError(f"takes bfloat16, got {', '.join(sorted(dtypes))}")
    widths = (pages.shape[1], C, q_rope.shape[-1])
    if widths != (BLOCK, LATENT, ROPE):
        raise NotImplementedError(
            f"takes pages of {BLOCK} tokens, {LATENT} latent and {ROPE} rope columns, got {widths}"
        )
    width, unit = (TOKEN_BYTES, "bytes") if float8 else (LATENT + ROPE, "columns")
    if pages.shape[2] != width:
        raise NotImplementedError(f"takes tokens of {width} {unit}, got {pages.shape[2]}")
    if not float8 and isinstance(config, ScoredQueries | Float8Pairs):
        raise NotImplementedError(f"takes a float8 cache with {config}, got a bfloat16 one")
    if float8 and isinstance(config, Config):
        raise NotImplementedError(f"the kernel of float8 caches has no config, got {config}")
    M = T * H
    padded = isinstance(config, Float8Pairs)
    if M % 8 and ((M < TILE and not padded) or isinstance(config, ScoredQueries)):
        raise NotImplementedError(f"takes T * H of {TILE} or more, or a multiple of 8, got {M}")
    if config is None and M <= MAX_QUERY_ROWS:
        config = ScoredQueries() if float8 and M <= MAX_ROWS else FewQueries()
    if config is None and float8 and -(-M // TILE) % 2 == 0:
        config = Float8Pairs()
    if isinstance(config, FewQueries) and M > MAX_QUERY_ROWS:
        raise NotImplementedError(
            f"FewQueries takes {MAX_QUERY_ROWS} query rows (T * H) at most, got {M}"
        )
    if scale < 0:
        raise NotImplementedError(f"takes a scale of 0 or more, got {scale}")
    if schedule is None:
        schedule = make_schedule(lengths, queries=T, heads=H, max_pages=block_tables.shape[1])
    # Pad to whole tiles of query rows, unless there is only one tile.
    whole_tiles = TILE if M > TILE and not isinstance(config, ScoredQueries) else 1
    if isinstance(config, Float8Pairs):
        whole_tiles = 2 * TILE
    padding = ((0, 0), (0, -M % whole_tiles), (0, 0))
    if isinstance(config, FewQueries):
        kernel = functools.partial(few_queries_kernel.attend, config=config)
    elif isinstance(config, ScoredQueries):
        kernel = functools.partial(scored_kernel.attend, config=config)
    elif isinstance(config, Float8Pairs):
        kernel = functools.partial(float8_pairs_kernel.attend, config=config)
    elif float8:
        kernel = float8_kernel.attend
    else:
        kernel = functools.partial(attend, config=config or Config())
    out, lse, (partials, partial_lse) = kernel(
        jnp.pad(q_latent.reshape(B, M, C), padding),
        jnp.pad(q_rope.reshape(B, M, ROPE), padding),
        pages,
        block_tables.astype(jnp.int32),
        schedule,
        queries=T,
        heads=H,
        scale=max(scale, 1e-30),  # not 0: masked scores are -inf, and 0 * -inf is NaN
        interpret=interpret,
    )
    return Parts(out, partials, partial_lse, schedule.split_sequences), lse


def make_schedule(
    lengths: Int[Array, " B"],
    *,
    queries: int,
    heads: int,
    max_pages: int,
    costs: Costs | None = None,
) -> Schedule:
    """Makes the schedule whose partitions fill the default device once.

    It depends only on the lengths, so one schedule serves all layers of a step.

    Args:
      lengths: cached tokens per sequence, including its queries.
      queries: number of query tokens T per sequence.
      heads: number of heads H.
      max_pages: width of the block table.
      costs: cost model of the scheduler, by default that of the kernel that T * H selects.
    """
    tiles = -(-queries * heads // TILE)
    partitions = max(1, multiprocessors() // tiles)
    costs = costs or (FEW_QUERIES_COSTS if queries * heads <= MAX_QUERY_ROWS else Costs())
    return schedule(lengths, max_pages=max_pages, partitions=partitions, costs=costs)
