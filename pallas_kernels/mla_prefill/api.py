"""Causal attention of many queries over expanded keys and values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.mla_prefill import blocked, cudnn, mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.mla_prefill.gradients import differentiable, without_first_keys


def _differentiable(forward: Callable[..., Any]) -> Callable[..., Any]:
    def mla_prefill(*arrays: Any, scale: float) -> Any:
        return differentiable(functools.partial(forward, scale=scale), scale=scale)(*arrays)

    return mla_prefill


BACKENDS = {
    "mosaic_gpu": without_first_keys(mosaic_gpu.mla_prefill),
    "cudnn": without_first_keys(_differentiable(cudnn.mla_prefill)),
    "mosaic_tpu": without_first_keys(mosaic_tpu.mla_prefill),
    "blocked": _differentiable(blocked.mla_prefill),
    "reference": reference.mla_prefill,
}


def mla_prefill(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    starts: Int[Array, " B"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    first_keys: Int[Array, "B T"] | None = None,
    *,
    scale: float,
    implementation: Implementation = None,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
    """Softmax attention; query t of sequence b sees the keys s with
    ``first_keys[b, t] <= s <= starts[b] + t, s < lengths[b]``.

    Without these three it is ordinary causal attention. With ``starts >= S`` every
    query sees all keys, as for a cached prefix; :func:`pallas_kernels.merge_attention` merges it
    with the causal part.

    Args:
      q: queries of width K = N + R, the rotated rope part last.
      k: keys of the same width.
      v: values of width V, which may differ from K (128 and 192 in DeepSeek-V3).
      starts: index, among the keys, of each sequence's first query. None for 0, which cuDNN
        requires: it computes the gradient on NVIDIA GPUs.
      lengths: number of valid keys per sequence, None for S. Keys and values past them may be
        anything.
      first_keys: first key that each query sees, None for 0. If that is the first of the query's
        own document, then attention is inside documents that are packed into one sequence. Blocks
        of keys that no query of a block sees are not computed.
      scale: factor of the scores.
      implementation: back-end name, or names in order of preference; see ``dispatch``.

    Returns:
      ``out`` in q's dtype and the log-sum-exp of the scores (natural logarithm, float32): zeros and
      -inf for a query that sees no key. Scores and softmax are float32.

    Raises:
      ValueError: ``implementation`` names no back-end.
      NotImplementedError: no selected back-end takes these arguments.
    """
    arrays = q, k, v, starts, lengths, first_keys
    return dispatch("mla_prefill", BACKENDS, implementation, *arrays, scale=scale)
