"""The public project: a norm, and projections of its result."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Array, Float

from pallas_kernels.decoder_layer.reference import Projection
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.project import mosaic_gpu, reference

# The reference is first: in a layer whose second half runs by separate operations, the kernel has
# not been measured.
BACKENDS = {"reference": reference.project, "mosaic_gpu": mosaic_gpu.project}


def project(
    x: Float[Array, "M D"],
    norm: Float[Array, " D"],
    projections: Sequence[Projection],
    *,
    eps: float,
    implementation: Implementation = None,
) -> list[Float[Array, "M _"]]:
    """Computes ``W (norm x / sqrt(mean(x^2) + eps))`` for each projection W.

    The norm is rounded to x's dtype, as between separate operations.

    Args:
      norm: weights of the norm.
      implementation: back-end name, or names in order of preference; see ``dispatch``. By default
        the reference.

    Raises:
      ValueError: the shapes do not match.
      NotImplementedError: no selected back-end takes these arguments.
    """
    D = x.shape[1]
    if norm.shape != (D,):
        raise ValueError(f"norm: expected shape {(D,)}, got {norm.shape}")
    if not projections:
        raise ValueError("projections: expected one or more, got none")
    for weight, scales in projections:
        if weight.ndim != 2 or weight.shape[1] != D:
            raise ValueError(f"projections: expected shapes (_, {D}), got {weight.shape}")
        blocks = tuple(-(-size // 128) for size in weight.shape)
        if scales and [scale.shape for scale in scales] != [blocks]:
            got = [scale.shape for scale in scales]
            raise ValueError(f"projections: expected scales of shape {blocks}, got {got}")
    return dispatch("project", BACKENDS, implementation, x, norm, projections, eps=eps)
