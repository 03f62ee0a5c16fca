"""Rescales the rows of a register tile, and skips it when all factors are 1, as they usually are.

Mosaic can branch only on scalars, but the factors are distributed over threads. So the threads of
the warpgroup vote, by one instruction: a barrier with a reduction.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from pallas_kernels.hopper.ir import inline, item
from pallas_kernels.hopper.tiles import ROW, WGMMA
from pallas_kernels.hopper.warpgroup import any_thread


def scale_rows(x: jax.Array, factors: jax.Array, *, interpret: Any = None) -> jax.Array:
    """``x * factors[:, None]`` for a float32 tile in WGMMA layout. A whole warpgroup calls it."""
    if interpret is not None:
        return x * lax.broadcast_in_dim(factors, x.shape, [0])
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=WGMMA)

    @inline(WGMMA, ROW, returns=result)
    def scaled(x: mgpu.FragmentedArray, factors: mgpu.FragmentedArray):
        one = mgpu.utils.c(1.0, ir.F32Type.get())
        registers = [
            item(register, i)
            for register in factors.registers.flat
            for i in range(ir.VectorType(register.type).shape[0])
        ]
        differs = [arith.cmpf(arith.CmpFPredicate.UNE, factor, one) for factor in registers]
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
