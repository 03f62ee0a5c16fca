"""Exact selection of the k tokens with the largest scores."""

from __future__ import annotations

from jaxtyping import Array, Float32, Int, Int32

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.top_k import mosaic_gpu, reference, threshold

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.top_k,
    "threshold": threshold.top_k,
    "reference": reference.top_k,
}


def top_k(
    scores: Float32[Array, "*batch S"],
    k: int,
    *,
    lengths: Int[Array, "*batch"] | None = None,
    implementation: Implementation = None,
) -> Int32[Array, "*batch k"]:
    """Returns the indices of the k largest scores of each row, in ascending order.

    Scores of -inf are never chosen. If fewer than k others exist, -1 fills the end of the row. Ties
    go to the lower index, and -0 ties with 0. So the result is a function of the scores alone, and
    k of at least the number of finite scores chooses all of them.

    Args:
      scores: no NaN.
      k: may exceed S.
      lengths: number of leading scores of each row after which all are -inf. A kernel need not read
        those.
      implementation: back-end name, or names in order of preference; see ``dispatch``.

    Raises:
      ValueError: k is below 1, or ``implementation`` names no back-end.
      NotImplementedError: no selected back-end takes these arguments.
    """
    if k < 1:
        raise ValueError(f"k: expected 1 or more, got {k}")
    return dispatch("top_k", BACKENDS, implementation, scores, k, lengths=lengths)
