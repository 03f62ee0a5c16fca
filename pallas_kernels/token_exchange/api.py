"""Sends a variable number of rows to every device; returns the received rows and counts."""

from __future__ import annotations

import math

import jax
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.token_exchange import mosaic_gpu, reference

BACKENDS = {"mosaic_gpu": mosaic_gpu.token_exchange, "reference": reference.token_exchange}


def token_exchange(
    rows: Shaped[Array, "n C W"],
    counts: Int32[Array, " n"],
    *,
    axes: tuple[str, ...],
    implementation: Implementation = None,
) -> tuple[Shaped[Array, "n C W"], Int32[Array, " n"]]:
    """All-to-all of a variable number of rows. It must be called inside shard_map.

    On device d, ``received[i][:received_counts[i]]`` is ``rows[d][:counts[d]]`` of device i. The n
    devices along ``axes`` are numbered in row-major order. Received rows past the counts are
    undefined. There is no gradient.

    Args:
      rows: buffers of C rows, one for each destination. The first ``counts[j]`` rows of ``rows[j]``
        are sent to device j.
      counts: number of rows to send to each device, at most C.
      axes: mesh axes along which to exchange.
      implementation: back-end name, or names in order of preference; see ``dispatch``.

    Returns:
      ``received`` and ``received_counts``, indexed by the sending device.

    Raises:
      ValueError: ``rows`` or ``counts`` do not match the number of devices along ``axes``.
      NotImplementedError: no selected back-end takes these arguments.
    """
    mesh = jax.sharding.get_abstract_mesh()
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if rows.shape[0] != devices or counts.shape != (devices,):
        raise ValueError(
            f"token_exchange: expected rows and counts for {devices} devices along"
            f" {' x '.join(axes)}, got {rows.shape} and {counts.shape}"
        )
    return dispatch("token_exchange", BACKENDS, implementation, rows, counts, axes=axes)
