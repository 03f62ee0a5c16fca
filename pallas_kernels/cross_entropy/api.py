"""The public cross_entropy."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.cross_entropy import mosaic_gpu, reference
from pallas_kernels.dispatch import Implementation, dispatch

BACKENDS = {"mosaic_gpu": mosaic_gpu.cross_entropy, "reference": reference.cross_entropy}


def cross_entropy(
    logits: Float[Array, "M W"],
    targets: Int[Array, " M"],
    weights: Float32[Array, " M"],
    *,
    implementation: Implementation = None,
) -> tuple[Float32[Array, " M"], Float[Array, "M W"]]:
    """Returns ``-log softmax(logits)[target]`` of each row, and the gradient of their weighted sum.

    Both are computed in float32. The gradient, ``weight * (softmax(logits) - onehot(target))``, is
    rounded to the dtype of the logits. Inside jit it takes their memory, unless they have another
    use.

    Args:
      targets: from 0 to W - 1.
      weights: factor of each row's loss; 0 leaves it out of the gradient.
      implementation: back-end name, or names in order of preference; see ``dispatch``.

    Raises:
      ValueError: ``implementation`` names no back-end.
      NotImplementedError: no selected back-end takes these arguments.
    """
    return dispatch("cross_entropy", BACKENDS, implementation, logits, targets, weights)
