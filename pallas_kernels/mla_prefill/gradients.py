"""The gradient of mla_prefill, for all of its back-ends but the reference.

It needs the result and its log-sum-exp, which any back-end of mla_prefill may have computed. So the
back-end of the gradient is chosen here, whatever that of the result is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pallas_kernels.dispatch import dispatch
from pallas_kernels.mla_prefill import blocked, cudnn, mosaic_gpu_gradient
from pallas_kernels.softmax import with_gradients

# cuDNN is first until ours has been timed on a GPU. Ours takes some of what cuDNN refuses.
BACKENDS = {
    "cudnn": cudnn.gradients,
    "mosaic_gpu": mosaic_gpu_gradient.gradients,
    "blocked": blocked.gradients,
}


def differentiable(attend: Callable[..., Any], *, scale: float) -> Callable[..., Any]:
    """Returns ``attend`` with a gradient.

    Args:
      attend: function of the arrays of :func:`pallas_kernels.mla_prefill` that returns its result.
      scale: factor of the scores.
    """
    choose = functools.partial(dispatch, "mla_prefill_gradient", BACKENDS, None, scale=scale)
    return with_gradients(attend, choose)
