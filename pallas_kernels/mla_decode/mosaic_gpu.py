"""mla_decode on Hopper GPUs: bfloat16, pages of 64 tokens, a latent of 512 and 64 rope keys.

The cache is bfloat16 or float8_cache's bytes, each with a kernel of its own; bfloat16 has another
for few query rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.hopper import multiprocessors, require_hopper
from pallas_kernels.mla_decode import few_queries_kernel, float8_kernel
from pallas_kernels.mla_decode.few_queries_kernel import MAX_QUERY_ROWS, FewQueries
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE, TOKEN_BYTES
from pallas_kernels.mla_decode.kernel_parts import TILE
from pallas_kernels.mla_decode.merge_kernel import merge_pieces
from pallas_kernels.mla_decode.mosaic_gpu_kernel import Config, attend
from pallas_kernels.mla_decode.schedule import BLOCK, FEW_QUERIES, Costs, Schedule, schedule


def mla_decode(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page bytes"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    schedule: Schedule | None = None,
    config: Config | FewQueries | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    """As :func:`pallas_kernels.mla_decode`.

    A row's last rounding may depend on the other rows' lengths, which decide where it is cut.

    Args:
      config: its class names the kernel; by default the number of query rows does.
    """
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
    if float8 and config is not None:
        raise NotImplementedError(f"the kernel of float8 caches has no settings, got {config}")
    M = T * H
    if M % 8 and M < TILE:
        raise NotImplementedError(f"takes T * H in eights, or {TILE} and more, got {M}")
    if config is None and not float8:
        config = FewQueries() if M <= MAX_QUERY_ROWS else Config()
    if isinstance(config, FewQueries) and M > MAX_QUERY_ROWS:
        raise NotImplementedError(f"few rows are {MAX_QUERY_ROWS} at most, got {M}")
    if scale < 0:
        raise NotImplementedError(f"takes a scale of 0 and more, got {scale}")
    if schedule is None:
        schedule = make_schedule(lengths, queries=T, heads=H, max_pages=block_tables.shape[1])
    # Whole tiles of query rows, or one that is not full.
    padding = ((0, 0), (0, -M % TILE if M > TILE else 0), (0, 0))
    kernel: Any = float8_kernel.attend
    if isinstance(config, FewQueries):
        kernel = functools.partial(few_queries_kernel.attend, config=config)
    elif config is not None:
        kernel = functools.partial(attend, config=config)
    out, lse, pieces = kernel(
        jnp.pad(q_latent.reshape(B, M, C), padding),
        jnp.pad(q_rope.reshape(B, M, ROPE), padding),
        pages,
        block_tables.astype(jnp.int32),
        schedule,
        queries=T,
        heads=H,
        scale=max(scale, 1e-30),  # masked scores are -inf, which times 0 would be NaN
        interpret=interpret,
    )
    values, weights = pieces
    out, lse = merge_pieces(out, lse, values, weights, schedule.split, interpret=interpret)
    return out[:, :M].reshape(B, T, H, C), lse[:, :M].reshape(B, T, H)


def make_schedule(
    lengths: Int[Array, " B"],
    *,
    queries: int,
    heads: int,
    max_pages: int,
    costs: Costs | None = None,
) -> Schedule:
    """The schedule that fills the default device; one serves all layers of a step."""
    tiles = -(-queries * heads // TILE)
    parts = max(1, multiprocessors() // tiles)
    costs = costs or (FEW_QUERIES if queries * heads <= MAX_QUERY_ROWS else Costs())
    return schedule(lengths, max_pages=max_pages, parts=parts, costs=costs)
