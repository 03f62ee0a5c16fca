"""Reference implementation of project: a norm, and matmuls of its result."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Array, Float

from pallas_kernels.decoder_layer.reference import Projection, multiply
from pallas_kernels.rms_norm import reference as rms_norm


def project(
    x: Float[Array, "M D"],
    norm: Float[Array, " D"],
    projections: Sequence[Projection],
    *,
    eps: float,
) -> list[Float[Array, "M _"]]:
    """Implements :func:`pallas_kernels.project`."""
    normed = rms_norm.rms_norm(x, norm, eps=eps)
    return [multiply(normed, *each).astype(x.dtype) for each in projections]
