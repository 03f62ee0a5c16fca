"""The gradient of mla_prefill, for all of its back-ends but the reference.

It needs the result and its log-sum-exp, which any back-end of mla_prefill may have computed. So the
back-end of the gradient is chosen here, whatever that of the result is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pallas_kernels.dispatch import dispatch
from pallas_kernels.mla_prefill import blocked, cudnn, mosaic_gpu_gradient
from pallas_kernels.softmax import with_gradients


def without_first_keys(backend: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a back-end, of mla_prefill or of its gradient, that refuses ``first_keys`` and calls
    ``backend``, which does not take them."""

    def call(
        q: Any,
        k: Any,
        v: Any,
        starts: Any = None,
        lengths: Any = None,
        first_keys: Any = None,
        *results: Any,
        **options: Any,
    ) -> Any:
        if first_keys is not None:
            raise NotImplementedError("takes first_keys=None only")
        return backend(q, k, v, starts, lengths, *results, **options)

    return call


# Ours takes 18 to 25 % less time than cuDNN's on an H200, see docs/kernels/mla_prefill.md.
BACKENDS = {
    "mosaic_gpu": without_first_keys(mosaic_gpu_gradient.gradients),
    "cudnn": without_first_keys(cudnn.gradients),
    "blocked": blocked.gradients,
}
_ARRAYS = 6  # of mla_prefill


def differentiable(attend: Callable[..., Any], *, scale: float) -> Callable[..., Any]:
    """Returns ``attend`` with a gradient.

    Args:
      attend: function of the arrays of :func:`pallas_kernels.mla_prefill`, or of the first of them,
        that returns its result.
      scale: factor of the scores.
    """

    def gradients(*arrays: Any) -> Any:
        *inputs, out, lse, d_out, d_lse = arrays
        inputs += [None] * (_ARRAYS - len(inputs))
        results = out, lse, d_out, d_lse
        return dispatch("mla_prefill_gradient", BACKENDS, None, *inputs, *results, scale=scale)

    return with_gradients(attend, gradients)
