"""Gathering of rows: a copy of each token for each of its experts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.gather_rows import mosaic_gpu, reference
from pallas_kernels.residuals import rounded

BACKENDS = {"mosaic_gpu": mosaic_gpu.gather_rows, "reference": reference.gather_rows}


def gather_rows(
    x: Num[Array, "M D"],
    rows: Int[Array, " N"],
    copies: Int[Array, "M K"] | None = None,
    *,
    implementation: Implementation = None,
) -> Num[Array, "N D"]:
    """Returns ``x[rows]``. An index outside 0 to M - 1 counts as the nearest one inside.

    The gradient flows to ``x``: that of a row is the sum over its copies, in float32 if ``copies``
    are known.

    Args:
      rows: int32 indices, any number of times each.
      copies: where in ``rows`` each row of ``x`` is, if each is there K times. The gradient is then
        a sum of gathers. A scatter, which it is otherwise, has no fixed order on a GPU.
      implementation: back-end name, or names in order of preference; see ``dispatch``.

    Raises:
      ValueError: ``x`` has no row, or ``rows`` are not int32.
      NotImplementedError: the named back-end does not support these arguments.
    """
    if not len(x):
        raise ValueError(f"x: expected at least one row, got shape {x.shape}")
    if rows.dtype != jnp.int32:
        raise ValueError(f"rows: expected int32, got {rows.dtype}")
    if copies is None:
        return dispatch("gather_rows", BACKENDS, implementation, x, rows)
    return _gather(implementation, x, rows, copies)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(
    implementation: Implementation, x: jax.Array, rows: jax.Array, copies: jax.Array
) -> jax.Array:
    return dispatch("gather_rows", BACKENDS, implementation, x, rows)


def _forward(
    implementation: Implementation, x: jax.Array, rows: jax.Array, copies: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _gather(implementation, x, rows, copies), copies


def _backward(
    implementation: Implementation, copies: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, None, None]:
    del implementation
    # XLA compiles gathers and sum to one kernel, which stores no copies. Without the barrier it
    # would gather in the kernel of a norm's gradient, which reduces whole rows.
    gathered = reference.gather_rows(cotangent, copies.reshape(-1)).reshape(*copies.shape, -1)
    total = jnp.sum(gathered, axis=1, dtype=jnp.float32)
    return rounded(total.astype(cotangent.dtype)), None, None


_gather.defvjp(_forward, _backward)
