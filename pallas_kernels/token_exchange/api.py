"""Rows to other devices, as many as there are for each, and how many came."""

from __future__ import annotations

import math

import jax
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.token_exchange import mosaic_gpu, reference

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.token_exchange,
    "reference": reference.token_exchange,
}


def token_exchange(
    rows: Shaped[Array, "n C W"],
    counts: Int32[Array, " n"],
    *,
    axes: tuple[str, ...],
    implementation: Implementation = None,
) -> tuple[Shaped[Array, "n C W"], Int32[Array, " n"]]:
    """``received[i][:received_counts[i]]`` are ``rows[me][:counts[me]]`` of device i.

    Runs inside shard_map, on each of the n devices along ``axes``, which count row-major. Received
    rows past the counts are undefined. No gradient.

    Args:
      rows: C places for each device; of device j's, the first ``counts[j]`` are sent.
      counts: 0 .. C.

    Raises:
      ValueError: rows or counts that are not of as many devices as lie along ``axes``.
      NotImplementedError: the named back-end does not take these arguments.
    """
    mesh = jax.sharding.get_abstract_mesh()
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if rows.shape[0] != devices or counts.shape != (devices,):
        raise ValueError(
            f"token_exchange: expected rows and counts for {devices} devices along"
            f" {' x '.join(axes)}, got {rows.shape} and {counts.shape}"
        )
    return dispatch("token_exchange", BACKENDS, implementation, rows, counts, axes=axes)
