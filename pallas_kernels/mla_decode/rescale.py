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
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

_FIRST_VOTE = 8  # of the sixteen hardware barriers; Mosaic uses one, and one a warpgroup
_VOTE = """{
    .reg .pred p, any;
    setp.ne.b32 p, $2, 0;
    bar.red.or.pred any, $1, 128, p;
    selp.b32 $0, 1, 0, any;
}"""


def scale_rows(x: jax.Array, factors: jax.Array, *, interpret: Any = None) -> jax.Array:
    """``x * factors[:, None]`` for a float32 tile in WGMMA layout, called by a whole warpgroup."""
    if interpret is not None:
        return x * lax.broadcast_in_dim(factors, x.shape, [0])
    tile, row = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=tile)

    @plgpu.inline_mgpu(arg_types=(tile, row), return_type=result)
    def scaled(_: Any, x: mgpu.FragmentedArray, factors: mgpu.FragmentedArray):
        i32 = ir.IntegerType.get_signless(32)
        one = mgpu_utils.c(1.0, ir.F32Type.get())
        registers = [
            vector.extract(
                register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i])
            )
            for register in factors.registers.flat
            for i in range(ir.VectorType(register.type).shape[0])
        ]
        others = [arith.cmpf(arith.CmpFPredicate.UNE, factor, one) for factor in registers]
        moved: Any = functools.reduce(arith.ori, others)
        barrier = arith.addi(
            arith.divui(mgpu_utils.thread_idx(), mgpu_utils.c(128, i32)),
            mgpu_utils.c(_FIRST_VOTE, i32),
        )
        vote: Any = llvm.inline_asm(
            i32,
            [barrier, arith.extui(i32, moved)],
            _VOTE,
            "=r,r,r",
            has_side_effects=True,
        )
        anyone = arith.cmpi(arith.CmpIPredicate.ne, vote, mgpu_utils.c(0, i32))
        kept = list(x.registers.flat)
        branch: Any = scf.IfOp(anyone, [register.type for register in kept], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            product = x * factors.broadcast_in_dim(x.shape, (0,), x.layout)
            scf.yield_(list(product.registers.flat))
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(kept)
        registers = np.array(list(branch.results), dtype=object).reshape(x.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)

    return scaled(x, factors)  # pyright: ignore[reportCallIssue]: the context is Mosaic's


def meet(interpret: Any = None) -> None:
    """The threads of a warpgroup wait for each other, and for nothing else: what they write in
    shared memory may still be under way to the tensor cores' and the copies' eyes."""
    if interpret is not None:
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def barrier(_: Any):
        mgpu_utils.warpgroup_barrier()

    barrier()  # pyright: ignore[reportCallIssue]: the context is Mosaic's


def publish(interpret: Any = None) -> None:
    """What this thread wrote in shared memory, to the tensor cores and the copies: ``commit_smem``
    without its wait for the warpgroup's other threads."""
    if interpret is not None:
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def fence(_: Any):
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    fence()  # pyright: ignore[reportCallIssue]: the context is Mosaic's
