"""Multi-head latent attention of a few queries over a paged cache (absorbed form)."""

from __future__ import annotations

import functools

from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.hopper.split_kv import Parts, Schedule
from pallas_kernels.mla_decode import cpu, mosaic_gpu, mosaic_tpu, reference

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.mla_decode,
    "mosaic_tpu": mosaic_tpu.mla_decode,
    "cpu": cpu.mla_decode,
    "reference": reference.mla_decode,
}

PARTS_BACKENDS = {
    "mosaic_gpu": mosaic_gpu.mla_decode_parts,
    "reference": reference.mla_decode_parts,
}


def page_width(columns: int, platform: str) -> int:
    """Returns the width that cache pages should have for tokens of ``columns`` = C + R numbers.

    On a TPU it is a multiple of 128. XLA gives narrower pages a layout that the kernel does not
    read, and copies all pages before every call.
    """
    if platform != "tpu":
        return columns
    return -(-columns // 128) * 128


def mla_decode(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page bytes"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    schedule: Schedule | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "B T H C"], Float[Array, "B T H"]]:
    """Softmax attention of each sequence's T queries over its cached latents.

    A cached token is ``[c | k]``: the normalised latent c of width C, which is both key and value
    for all heads, and the rotated rope key k of width R. Query t sees ``p = lengths - T + 1 + t``
    tokens::

        score[t, h, s] = scale * (q_latent[t, h] . c[s] + q_rope[t, h] . k[s])      s < p
        out[t, h]      = sum_s softmax(score)[t, h, s] c[s]

    Args:
      q_latent: the rope-free queries, already multiplied by W_UK.
      q_rope: the rotated rope queries.
      pages: the layer's cache. Token s of sequence b is in page ``block_tables[b, s // page]`` at
        slot ``s % page``. Columns past C + R are ignored, see :func:`page_width`. If uint8, tokens
        are in the format of :func:`pallas_kernels.quantize_latent`, and are read as
        :func:`pallas_kernels.dequantize_latent` returns them in q_latent's dtype. ``mosaic_gpu``
        takes C = 512 and R = 64, rounds the scales to bfloat16 and requires them to be below 2^8.
      block_tables: page numbers. Entries past a sequence's length may be anything.
      lengths: cached tokens per sequence, *including* its T queries. A query that sees no token
        (``lengths < T - t``) returns zeros and an LSE of -inf. A query that would see past the
        table's end is padding, and its result is undefined.
      scale: factor of the scores, ``(N + R)^-0.5`` times YaRN's correction.
      schedule: :func:`pallas_kernels.mla_decode_schedule` of these lengths, for the ``mosaic_gpu``
        back-end, or :func:`pallas_kernels.mla_decode_whole_sequences`, with which a sequence's
        result depends on no other sequence. Computed here if missing; the other back-ends ignore
        it.
      implementation: back-end name, or names in order of preference; see ``dispatch``.

    Returns:
      ``out`` in q_latent's dtype, still in the latent space (the caller multiplies it by W_UV), and
      the log-sum-exp of the scores: natural logarithm, float32. Scores and softmax are float32.

    Raises:
      ValueError: ``implementation`` names no back-end.
      NotImplementedError: no selected back-end takes these arguments.
    """
    scheduled = functools.partial(mosaic_gpu.mla_decode, schedule=schedule)
    backends = BACKENDS | {"mosaic_gpu": scheduled}
    arrays = q_latent, q_rope, pages, block_tables, lengths
    return dispatch("mla_decode", backends, implementation, *arrays, scale=scale)


def mla_decode_parts(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page bytes"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    schedule: Schedule | None = None,
    implementation: Implementation = None,
) -> tuple[Parts, Float[Array, "B rows"]]:
    """Does :func:`mla_decode` without merging the parts of the sequences that a schedule splits.

    :func:`pallas_kernels.feed_forward` merges them.

    Args: see :func:`mla_decode`.

    Returns:
      The parts, and the log-sum-exps of sequences that are not split.

    Raises:
      ValueError: ``implementation`` names no back-end.
      NotImplementedError: no selected back-end takes these arguments.
    """
    scheduled = functools.partial(mosaic_gpu.mla_decode_parts, schedule=schedule)
    backends = PARTS_BACKENDS | {"mosaic_gpu": scheduled}
    arrays = q_latent, q_rope, pages, block_tables, lengths
    return dispatch("mla_decode_parts", backends, implementation, *arrays, scale=scale)
