"""Gathering of rows: a copy of each token for each of its experts."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Num

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.gather_rows import mosaic_gpu, reference

BACKENDS = {"mosaic_gpu": mosaic_gpu.gather_rows, "reference": reference.gather_rows}


def gather_rows(
    x: Num[Array, "M D"], rows: Int[Array, " N"], *, implementation: Implementation = None
) -> Num[Array, "N D"]:
    """Returns ``x[rows]``. An index outside 0 to M - 1 counts as the nearest one inside.

    The gradient flows to ``x``: that of a row is the sum over its copies.

    Args:
      rows: int32 indices, any number of times each.
      implementation: back-end name, or names in order of preference; see ``dispatch``.

    Raises:
      ValueError: ``x`` has no row, or ``rows`` are not int32.
      NotImplementedError: the named back-end does not support these arguments.
    """
    if not len(x):
        raise ValueError(f"x: expected at least one row, got shape {x.shape}")
    if rows.dtype != jnp.int32:
        raise ValueError(f"rows: expected int32, got {rows.dtype}")
    return dispatch("gather_rows", BACKENDS, implementation, x, rows)
