"""Latent attention of a few queries against a paged cache (absorbed form)."""

from __future__ import annotations

import functools

from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.mla_decode import cpu, mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.mla_decode.schedule import Schedule

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.mla_decode,
    "mosaic_tpu": mosaic_tpu.mla_decode,
    "cpu": cpu.mla_decode,
    "reference": reference.mla_decode,
}


def page_width(columns: int, platform: str) -> int:
    """Columns that pages of tokens of C + R should have.

    On a TPU a multiple of 128: XLA gives narrower pages another layout than the kernel reads, and
    copies them all before every call.
    """
    return -(-columns // 128) * 128 if platform == "tpu" else columns


def mla_decode(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page 656"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    schedule: Schedule | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "B T H C"], Float[Array, "B T H"]]:
    """Softmax attention of T queries a row over that row's cached latents.

    A cached token is ``[c | k]``: the normed latent c, C wide, which is key and value to all heads,
    and the rotated rope key k, R wide. With ``p = lengths - T + 1 + t`` tokens visible to query t::

        score[t, h, s] = scale * (q_latent[t, h] . c[s] + q_rope[t, h] . k[s])      s < p
        out[t, h]      = sum_s softmax(score)[t, h, s] c[s]

    Args:
      q_latent: the rope-free queries, already folded through W_UK.
      q_rope: the rotated rope queries.
      pages: the layer's cache. Token s of row b stands in page ``block_tables[b, s // page]`` at
        slot ``s % page``. Columns past C + R may be anything, see :func:`page_width`. uint8: tokens
        as :func:`pallas_kernels.quantize_latent` writes them, C is then 512 and R 64, and a cached
        token is what :func:`pallas_kernels.dequantize_latent` makes of it in q_latent's dtype.
        ``mosaic_gpu`` rounds their scales to bfloat16 and takes scales below 2^8.
      block_tables: page numbers; entries past a row's length may be anything.
      lengths: cached tokens a row, *including* its T queries. A query that sees no token
        (``lengths < T - t``) gives zeros and an LSE of -inf; one that would see past the table's
        end is padding, and its result undefined.
      scale: factor of the scores, ``(N + R)^-0.5`` times YaRN's correction.
      schedule: :func:`pallas_kernels.mla_decode_schedule` of these lengths, for the back-end that
        divides its work by one (``mosaic_gpu``); made here if it is missing.

    Returns:
      ``out`` in q_latent's dtype, still latent: the caller folds it through W_UV; and the scores'
      log-sum-exp, natural logarithm, float32. Scores and softmax are float32.

    Raises:
      ValueError: ``implementation`` names no back-end.
      NotImplementedError: the named back-end does not take these arguments.
    """
    scheduled = functools.partial(mosaic_gpu.mla_decode, schedule=schedule)
    return dispatch(
        "mla_decode",
        BACKENDS | {"mosaic_gpu": scheduled},
        implementation,
        q_latent,
        q_rope,
        pages,
        block_tables,
        lengths,
        scale=scale,
    )
