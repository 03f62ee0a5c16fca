"""Causal attention of many queries over expanded keys and values."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.mla_prefill import mosaic_gpu, mosaic_tpu, reference

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.mla_prefill,
    "mosaic_tpu": mosaic_tpu.mla_prefill,
    "reference": reference.mla_prefill,
}


def mla_prefill(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    implementation: Implementation = None,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
    """Softmax attention in which query t of row b sees keys ``s <= starts[b] + t, s < lengths[b]``.

    ``starts = 0`` is a plain causal prompt. A prefix that all queries see whole is a call with
    ``starts >= S``; :func:`pallas_kernels.merge_attention` joins it to the rest.

    Args:
      q, k: K = N + R wide, the rotated rope part last.
      v: V wide, V and K may differ (128 and 192 in DeepSeek-V3).
      starts: index, among the keys, of each row's first query.
      lengths: valid keys a row; keys and values past them may be anything.
      scale: factor of the scores.

    Returns:
      ``out`` in q's dtype (zeros where a query sees no key) and the scores' log-sum-exp, natural
      logarithm (-inf there). Scores and softmax are float32.

    Raises:
      ValueError: ``implementation`` names no back-end.
      NotImplementedError: the named back-end does not take these arguments.
    """
    return dispatch("mla_prefill", BACKENDS, implementation, q, k, v, starts, lengths, scale=scale)
