"""Online softmax in a warpgroup's registers, in base 2.

Scores are multiplied by log2(e) and the softmax's scale, so that P = 2^(score - maximum). The
running maximum of a query row is raised only when a score exceeds it by more than SLACK. Until then
P may reach 2^SLACK, which neither float32 nor bfloat16 minds, and earlier results need no
rescaling.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_kernels.hopper.ir import float_const, inline, numbers_of
from pallas_kernels.hopper.tiles import ROW, WGMMA
from pallas_kernels.hopper.warpgroup import any_thread

LOG2E = math.log2(math.e)
NO_SCORE = -1e30  # initial running maximum: finite, because -inf - -inf would be NaN
SLACK = 8.0
SUM_COLUMNS = 8  # columns of partial_row_sums: the narrowest slice of a WGMMA register tile


def raised_maximum(maximum: jax.Array, running: jax.Array) -> jax.Array:
    """Returns the running maximum after scores whose maximum is ``maximum``."""
    return jnp.where(maximum > running + SLACK, maximum, running)


def partial_row_sums(p: jax.Array) -> jax.Array:
    """Sums [rows, columns] to [rows, SUM_COLUMNS], without an exchange between threads."""
    columns = range(0, p.shape[1], SUM_COLUMNS)
    return functools.reduce(jnp.add, (p[:, c : c + SUM_COLUMNS] for c in columns))


def merge_sums(
    maxima: Sequence[jax.Array], sums: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Merges two sums of exponentials. Returns the maximum, and the sum relative to it."""
    maximum = jnp.maximum(*maxima)
    return maximum, sums[0] * jnp.exp2(maxima[0] - maximum) + sums[1] * jnp.exp2(
        maxima[1] - maximum
    )


def log_sum_exp(maximum: jax.Array, total: jax.Array) -> jax.Array:
    """Returns the natural logarithm of a sum of exponentials ``total`` relative to a ``maximum`` in
    base 2, and -inf for an empty sum."""
    lse = (maximum + jnp.log(total) * LOG2E) * (1.0 / LOG2E)
    return jnp.where(total > 0.0, lse, jnp.full_like(lse, -jnp.inf))


def reciprocal(total: jax.Array) -> jax.Array:
    """Returns ``1 / total``, or 0 for an empty sum."""
    return jnp.where(total > 0.0, 1.0 / total, 0.0)


def scale_rows(x: jax.Array, factors: jax.Array, *, interpret: Any = None) -> jax.Array:
    """Returns ``x * factors[:, None]`` for a float32 tile in WGMMA layout. A whole warpgroup calls
    it. It skips the multiplication when all factors are 1, as they usually are. Mosaic can branch
    only on scalars, but the factors are distributed over threads. So the threads of the warpgroup
    vote, by one instruction: a barrier with a reduction."""
    if interpret is not None:
        return x * lax.broadcast_in_dim(factors, x.shape, [0])
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=WGMMA)

    @inline(WGMMA, ROW, returns=result)
    def scaled(x: mgpu.FragmentedArray, factors: mgpu.FragmentedArray):
        one = float_const(1.0)
        differs = [arith.cmpf(arith.CmpFPredicate.UNE, x, one) for x in numbers_of(factors)]
        any_differs: Any = functools.reduce(arith.ori, differs)
        must_scale = any_thread(any_differs)
        unscaled = list(x.registers.flat)
        branch: Any = scf.IfOp(must_scale, [register.type for register in unscaled], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            product = x * factors.broadcast_in_dim(x.shape, (0,), x.layout)
            scf.yield_(list(product.registers.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(unscaled)
        registers = np.array(list(branch.results), dtype=object).reshape(x.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)

    return scaled(x, factors)
