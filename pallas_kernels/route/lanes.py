"""Numbers of a warpgroup, one a thread: [warps, lanes]. How they come from memory and go there.

Indices are of arrays laid out flat, so that a row's end needs no padding.
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

from pallas_kernels.mosaic_ir import REF, array, asm, i32, i64, inline, instruction

WARPS, LANES = 4, 32
SHAPE = WARPS, LANES
LAYOUT = plgpu.Layout.TILED(
    plgpu.Tiling((SHAPE, (1,))),  # pyright: ignore[reportArgumentType]
    warp_dims=(-3,),
    lane_dims=(-2,),
    vector_dim=-1,
)


def number(axis: int) -> jax.Array:
    """Each thread's warp, or its lane."""
    return plgpu.broadcasted_iota(jnp.int32, SHAPE, axis, layout=LAYOUT)


def over_warp(reduce: Any, values: jax.Array) -> jax.Array:
    """What a warp's lanes have together, in each of them. Of integers' sum and maximum it is one
    instruction, of floats ten."""
    found = lax.broadcast_in_dim(reduce(values, axis=1), SHAPE, (0,))
    return plgpu.layout_cast(found, LAYOUT)


def kept(values: jax.Array, there: jax.Array, other: int) -> jax.Array:
    """``values`` that are ``there``, elsewhere ``other``.

    The constant must be the second of the two: a select whose first is a constant has lost its sign
    in Mosaic GPU, and what follows compares and maximises unsigned numbers.
    """
    return jnp.where(there, values, other)


def load_rows(ref: Any, first: jax.Array, n: int, interpret: Any) -> jax.Array:
    """``ref[first:][:n]`` of each warp from global memory, n LANES, or 1 for all lanes; a warp's
    lanes agree where."""
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
        found = asm(text, kinds, _start(ref), _only(index), result=kind, effects=True)
        held = vector.broadcast(ir.VectorType.get((1,), kind), found)
        return array([held], SHAPE, LAYOUT, is_signed=True if integer else None)

    return read(ref, first if n == 1 else first + number(1))


def store(ref: Any, index: jax.Array, values: jax.Array, there: jax.Array, interpret: Any) -> None:
    """``ref[index] = values`` in global memory, of the threads that are ``there``."""
    if interpret is not None:
        for warp in range(WARPS):
            for lane in range(LANES):

                @pl.when(there[warp, lane])
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

    write(ref, jnp.where(there, index, -1), values)


def store_rows(
    ref: Any, first: jax.Array, values: jax.Array, n: int, there: jax.Array, interpret: Any
) -> None:
    """``ref[first:][:n] = values[:n]`` of each warp that is ``there``; a warp's lanes agree."""
    if interpret is None:
        lane = number(1)
        store(ref, first + lane, values, there if n == LANES else there & (lane < n), interpret)
        return
    for warp in range(WARPS):

        @pl.when(there[warp, 0])
        def _(warp: int = warp) -> None:
            ref[pl.ds(first[warp, 0], n)] = values[warp, :n]


def meet_cluster(barriers: list[Any], interpret: Any) -> None:
    """All threads of a cluster wait for one another, and see what the others wrote to memory. The
    interpreter has no such instruction, and a barrier for it."""
    if interpret is not None:
        plgpu.barrier_arrive(barriers[0])
        plgpu.barrier_wait(barriers[0])
        return

    def meet() -> None:
        instruction("barrier.cluster.arrive.release.aligned;")
        instruction("barrier.cluster.wait.acquire.aligned;")

    inline()(meet)()


def maximum(values: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.maximum, values)


def _start(ref: Any) -> Any:
    return llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(ref))


def _only(held: Any) -> Any:
    """The thread's number."""
    return llvm.extractelement(held.registers.item(), mgpu.utils.c(0, i32()))
