"""Arrays with one number per thread of a warpgroup, [warps, lanes]: loads, stores, reductions.

Global memory is indexed as flat arrays, so that rows need no padding.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.hopper.ir import REF, array, asm, i32, i64, inline, instruction

WARPS, LANES = 4, 32
SHAPE = WARPS, LANES
LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling((SHAPE, (1,))),  # pyright: ignore[reportArgumentType]
    warp_dims=(-3,),
    lane_dims=(-2,),
    vector_dim=-1,
)


def thread_index(axis: int) -> jax.Array:
    """Returns each thread's warp (axis 0) or lane (axis 1)."""
    return plgpu.broadcasted_iota(jnp.int32, SHAPE, axis, layout=LAYOUT)


def over_warp(reduce: Any, values: jax.Array) -> jax.Array:
    """Reduces over the lanes of each warp. Every lane gets the result.

    The sum and the maximum of integers are one instruction, those of floats ten.
    """
    result = lax.broadcast_in_dim(reduce(values, axis=1), SHAPE, (0,))
    return plgpu.layout_cast(result, LAYOUT)


def select(values: jax.Array, mask: jax.Array, other: int) -> jax.Array:
    """Returns ``values`` where ``mask``, and ``other`` elsewhere.

    The constant must be the second operand. If the first operand of a select is a constant, Mosaic
    GPU drops the signedness of the result, and later comparisons and maxima are unsigned.
    """
    return jnp.where(mask, values, other)


def add_if(mask: jax.Array, count: jax.Array) -> jax.Array:
    """Returns ``count + 1`` where ``mask``, and ``count`` elsewhere.

    Adding the mask as an integer would give the same instructions, but to lower a conversion from
    one bit Mosaic GPU starts ptxas each time, which takes 7 ms.
    """
    return jnp.where(mask, count + 1, count)


def load_rows(ref: Any, first: jax.Array, n: int, interpret: Any) -> jax.Array:
    """Loads ``ref[first:][:n]`` from global memory in each warp, one number per lane.

    Args:
      first: index in ``ref``, equal in all lanes of a warp.
      n: LANES, or 1 to load the same number in all lanes.
    """
    if interpret is not None:
        rows = [ref[pl.ds(first[warp, 0], n)] for warp in range(WARPS)]
        return jnp.broadcast_to(jnp.stack(rows), SHAPE)

    @inline(REF, LAYOUT, returns=plgpu.ShapeDtypeStruct(SHAPE, ref.dtype, layout=LAYOUT))
    def read(ref: Any, index: Any) -> Any:
        integer = isinstance(ir.MemRefType(ref.type).element_type, ir.IntegerType)
        kind = i32() if integer else ir.F32Type.get()
        text = """{
            .reg .b64 at;
            mad.wide.s32 at, $2, 4, $1;
            ld.global.b32 $0, [at];
        }"""
        kinds = "=r,l,r" if integer else "=f,l,r"
        result = asm(text, kinds, _start(ref), _only(index), result=kind, effects=True)
        register = vector.broadcast(ir.VectorType.get((1,), kind), result)
        return array([register], SHAPE, LAYOUT, is_signed=True if integer else None)

    return read(ref, first if n == 1 else first + thread_index(1))


def store(ref: Any, index: jax.Array, values: jax.Array, mask: jax.Array, interpret: Any) -> None:
    """Sets ``ref[index] = values`` in global memory, in the threads where ``mask``."""
    if interpret is not None:
        for warp in range(WARPS):
            for lane in range(LANES):

                @pl.when(mask[warp, lane])
                def _(at: tuple[int, int] = (warp, lane)) -> None:
                    ref[index[at]] = values[at]

        return

    @inline(REF, LAYOUT, LAYOUT)
    def write(ref: Any, index: Any, values: Any) -> None:
        text = """{
            .reg .b64 at;
            .reg .pred there;
            setp.ge.s32 there, $1, 0;
            mad.wide.s32 at, $1, 4, $0;
            @there st.global.b32 [at], $2;
        }"""
        value = llvm.bitcast(i32(), _only(values))
        asm(text, "l,r,r,~{memory}", _start(ref), _only(index), value, effects=True)

    write(ref, jnp.where(mask, index, -1), values)


def store_rows(
    ref: Any, first: jax.Array, values: jax.Array, n: int, mask: jax.Array, interpret: Any
) -> None:
    """Sets ``ref[first:][:n] = values[:n]`` in each warp where ``mask``.

    ``first`` and ``mask`` are equal in all lanes of a warp.
    """
    if interpret is None:
        lane = thread_index(1)
        store(ref, first + lane, values, mask if n == LANES else mask & (lane < n), interpret)
        return
    for warp in range(WARPS):

        @pl.when(mask[warp, 0])
        def _(warp: int = warp) -> None:
            ref[pl.ds(first[warp, 0], n)] = values[warp, :n]


def sync_cluster(barriers: list[Any], interpret: Any) -> None:
    """Synchronises all threads of a cluster, and makes their memory writes visible to each other.

    The interpreter does not have this instruction and uses a cluster barrier instead.
    """
    if interpret is not None:
        plgpu.barrier_arrive(barriers[0])
        plgpu.barrier_wait(barriers[0])
        return

    def sync() -> None:
        instruction("barrier.cluster.arrive.release.aligned;")
        instruction("barrier.cluster.wait.acquire.aligned;")

    inline()(sync)()


def maximum(values: list[jax.Array]) -> jax.Array:
    """Returns the elementwise maximum of several arrays."""
    return functools.reduce(jnp.maximum, values)


def _start(ref: Any) -> Any:
    return llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(ref))


def _only(register: Any) -> Any:
    """Returns the register of a thread's only number."""
    return llvm.extractelement(register.registers.item(), mgpu.utils.c(0, i32()))
