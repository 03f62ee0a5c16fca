"""Multi-head latent attention to selected tokens (absorbed form), paged or not."""

from __future__ import annotations

import functools
from typing import Any

from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.sparse_mla_decode import mosaic_gpu, reference
from pallas_kernels.sparse_mla_decode.gradients import differentiable

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.sparse_mla_decode,
    "reference": reference.sparse_mla_decode,
}


def _prefill(*arrays: Any, scale: float) -> Any:
    attend = functools.partial(reference.sparse_mla_prefill, scale=scale)
    return differentiable(attend, scale=scale)(*arrays)


PREFILL_BACKENDS = {
    "mosaic_gpu": mosaic_gpu.sparse_mla_prefill,
    "reference": _prefill,
}


def sparse_mla_decode(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page bytes"],
    block_tables: Int[Array, "B max_pages"],
    indices: Int[Array, "B T K"],
    *,
    scale: float,
    implementation: Implementation = None,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    """Softmax attention of each query to its own K tokens.

    All arguments but ``indices`` are those of :func:`pallas_kernels.mla_decode`.

    Args:
      indices: positions of the tokens that all heads of a query attend to, without repetitions. An
        index of -1 stands for no token: neither its score nor its data has an effect. A query's own
        position is not an argument; its indices determine which tokens it sees.

    Returns:
      ``out`` in q_latent's dtype and the log-sum-exp of the scores (natural logarithm, float32):
      zeros and -inf for a query without tokens. Scores and softmax are float32.

    Raises:
      ValueError: ``implementation`` names no back-end.
      NotImplementedError: no selected back-end takes these arguments.
    """
    arrays = q_latent, q_rope, pages, block_tables, indices
    return dispatch("sparse_mla_decode", BACKENDS, implementation, *arrays, scale=scale)


def sparse_mla_prefill(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    latents: Float[Array, "B S CR"],
    indices: Int[Array, "B T K"],
    *,
    scale: float,
    implementation: Implementation = None,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    """Softmax attention of each query to its own K of the S tokens of its sequence.

    It is :func:`pallas_kernels.sparse_mla_decode` without pages, for many queries::

        score[t, h, i] = scale * (q_latent[t, h] . c[s] + q_rope[t, h] . k[s])    s = indices[t, i]
        out[t, h]      = sum_i softmax(score)[t, h, i] c[s]

    Each query reads its own tokens, so that a multi-head form would have to expand K keys and
    values per query. Gradients flow to queries and latents. The arguments that are not listed are
    those of ``sparse_mla_decode``.

    Args:
      latents: ``[c | k]`` of every token: the normalised latent, then the rotated rope key.
      indices: tokens of each query, without repetitions; -1 stands for no token.

    Returns:
      ``out`` in q_latent's dtype and the log-sum-exp of the scores (natural logarithm, float32):
      zeros and -inf for a query without tokens.

    Raises:
      ValueError: ``implementation`` names no back-end.
      NotImplementedError: no selected back-end takes these arguments.
    """
    arrays = q_latent, q_rope, latents, indices
    return dispatch("sparse_mla_prefill", PREFILL_BACKENDS, implementation, *arrays, scale=scale)
