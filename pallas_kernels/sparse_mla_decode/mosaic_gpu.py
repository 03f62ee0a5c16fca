"""sparse_mla_decode on Hopper GPUs: bfloat16 queries, latent width 512, rope width 64.

The cache is bfloat16 or in the format of :mod:`float8_cache`, in pages of any size.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.hopper import multiprocessors, require_hopper
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE, TOKEN_BYTES
from pallas_kernels.mla_decode.merge import merge_partials
from pallas_kernels.mla_decode.row_tiles import TILE
from pallas_kernels.sparse_mla_decode.mosaic_gpu_kernel import Config, attend
from pallas_kernels.sparse_mla_decode.work import PAIR, Work, divide


def sparse_mla_decode(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page bytes"],
    block_tables: Int[Array, "B max_pages"],
    indices: Int[Array, "B T K"],
    *,
    scale: float,
    work: Work | None = None,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    """Implements :func:`pallas_kernels.sparse_mla_decode`.

    Args:
      work: division of the key blocks among programs; :func:`plan` by default. It depends on the
        shapes alone. The number of pieces affects the last rounding.
      config: tuning parameters.
      interpret: parameters of Mosaic GPU's interpreter, to run without a GPU.
    """
    require_hopper(interpret)
    B, T, H, C = q_latent.shape
    float8 = pages.dtype == jnp.uint8
    dtypes = {str(x.dtype) for x in (q_latent, q_rope, *([] if float8 else [pages]))}
    if dtypes != {"bfloat16"}:
        raise NotImplementedError(f"takes bfloat16, got {', '.join(sorted(dtypes))}")
    Q, (_, page, width) = B * T, pages.shape
    if (C, q_rope.shape[-1]) != (LATENT, ROPE):
        raise NotImplementedError(
            f"takes {LATENT} latent and {ROPE} rope columns, got {(C, q_rope.shape[-1])}"
        )
    if float8 and width != TOKEN_BYTES:
        raise NotImplementedError(f"takes float8 tokens of {TOKEN_BYTES} bytes, got {width}")
    if not float8 and (width < LATENT + ROPE or width % 8):
        raise NotImplementedError(
            f"takes tokens of {LATENT + ROPE} columns or more in multiples of 8, got {width}"
        )
    if H % 8:
        raise NotImplementedError(f"takes a multiple of 8 heads, got {H}")
    if 0 in indices.shape or not len(pages):
        raise NotImplementedError(f"takes no empty arrays, got indices {indices.shape}")
    if scale < 0:
        raise NotImplementedError(f"takes a scale of 0 or more, got {scale}")
    # Pad to pairs of key blocks, and to whole tiles of heads unless there is only one tile.
    indices = jnp.pad(
        indices.reshape(Q, -1).astype(jnp.int32),
        ((0, 0), (0, -indices.shape[-1] % PAIR)),
        constant_values=-1,
    )
    work = work or plan(Q, H, indices.shape[-1])
    padding = ((0, 0), (0, -H % TILE if H > TILE else 0), (0, 0))
    out, lse, (partials, partial_lse) = attend(
        jnp.pad(q_latent.reshape(Q, H, C), padding),
        jnp.pad(q_rope.reshape(Q, H, ROPE), padding),
        pages.reshape(-1, width),
        block_tables.astype(jnp.int32),
        indices,
        work=work,
        page=page,
        scale=scale,
        config=config or Config(),
        interpret=interpret,
    )
    if work.pieces > 1:
        out, lse = merge_partials(
            out, lse, partials, partial_lse, jnp.asarray(work.partial_results()),
            interpret=interpret,
        )  # fmt: skip
    return out[:, :H].reshape(B, T, H, C), lse[:, :H].reshape(B, T, H)


def plan(queries: int, heads: int, indices: int) -> Work:
    """Divides the work so that the programs fill the default device once.

    Args:
      queries: queries of all sequences.
      heads: heads H.
      indices: padded number of indices per query.
    """
    tiles = -(-heads // TILE)
    return divide(queries, indices, max(1, multiprocessors() // tiles))
