"""Rows of a register tile times their factors, which nearly always are all 1: then nothing is done.

Mosaic branches on scalars alone, and a factor is spread over the threads that hold its row. So the
threads of the warpgroup vote: one instruction, a barrier with a reduction.
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
from jaxlib.mlir.dialects import arith, nvvm, scf, vector

from pallas_kernels.mosaic_ir import any_thread, inline


def scale_rows(x: jax.Array, factors: jax.Array, *, interpret: Any = None) -> jax.Array:
    """``x * factors[:, None]`` for a float32 tile in WGMMA layout, called by a whole warpgroup."""
    if interpret is not None:
        return x * lax.broadcast_in_dim(factors, x.shape, [0])
    tile, row = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=tile)

    @inline(tile, row, returns=result)
    def scaled(x: mgpu.FragmentedArray, factors: mgpu.FragmentedArray):
        one = mgpu.utils.c(1.0, ir.F32Type.get())
        registers = [
            vector.extract(
                register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i])
            )
            for register in factors.registers.flat
            for i in range(ir.VectorType(register.type).shape[0])
        ]
        others = [arith.cmpf(arith.CmpFPredicate.UNE, factor, one) for factor in registers]
        moved: Any = functools.reduce(arith.ori, others)
        anyone = any_thread(moved)
        kept = list(x.registers.flat)
        branch: Any = scf.IfOp(anyone, [register.type for register in kept], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            product = x * factors.broadcast_in_dim(x.shape, (0,), x.layout)
            scf.yield_(list(product.registers.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(kept)
        registers = np.array(list(branch.results), dtype=object).reshape(x.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)

    return scaled(x, factors)


def publish(interpret: Any = None) -> None:
    """What this thread wrote in shared memory, to the tensor cores and the copies: ``commit_smem``
    without its wait for the warpgroup's other threads."""
    if interpret is not None:
        plgpu.commit_smem()
        return

    @inline()
    def fence():
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    fence()
