"""Root-mean-square normalisation, and the residual add fused with it."""

from __future__ import annotations

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.rms_norm import mosaic_gpu, reference

BACKENDS = {"mosaic_gpu": mosaic_gpu.rms_norm, "reference": reference.rms_norm}
ADD_BACKENDS = {"mosaic_gpu": mosaic_gpu.add_rms_norm, "reference": reference.add_rms_norm}


def rms_norm(
    x: Float[Array, "*batch D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
    implementation: Implementation = None,
) -> Float[Array, "*batch D"]:
    """Returns ``weight * x / sqrt(mean(x^2) + eps)`` over the last axis.

    Computed in float32, then cast to x's dtype.

    Raises:
      NotImplementedError: no selected back-end takes these arguments.
    """
    return dispatch("rms_norm", BACKENDS, implementation, x, weight, eps=eps)


def add_rms_norm(
    x: Float[Array, "*batch D"],
    y: Float[Array, "*batch D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
    implementation: Implementation = None,
) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch D"]]:
    """Returns ``x + y``, summed in float32 and cast to x's dtype, and its :func:`rms_norm`.

    Raises:
      NotImplementedError: no selected back-end takes these arguments.
    """
    return dispatch("add_rms_norm", ADD_BACKENDS, implementation, x, y, weight, eps=eps)
