"""Arrays with one number per thread of a warpgroup, [warps, lanes]: loads, stores, reductions.

Memory, global or shared, is indexed as flat arrays, so that rows need no padding.
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
from jaxlib.mlir.dialects import llvm

from pallas_kernels.hopper.ir import (
    REF,
    Registers,
    array,
    asm,
    const,
    f32,
    global_address,
    i32,
    inline,
    shared_address,
    single,
    warp_prefix_sum,
)
from pallas_kernels.hopper.launch import Ref
from pallas_kernels.hopper.warpgroup import when

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
    """Reduces over the lanes of each warp; all get the result. The sum and the maximum of integers
    are one instruction, those of floats ten."""
    result = lax.broadcast_in_dim(reduce(values, axis=1), SHAPE, (0,))
    return plgpu.layout_cast(result, LAYOUT)


def prefix_sums(values: jax.Array, interpret: Any) -> jax.Array:
    """Returns the sum of the integers of each lane and the lanes below it in the warp."""
    if interpret is not None:
        return jnp.cumsum(values, axis=1, dtype=jnp.int32)

    @inline(LAYOUT, returns=plgpu.ShapeDtypeStruct(SHAPE, jnp.int32, layout=LAYOUT))
    def scan(values: Registers) -> Registers:
        return per_thread(warp_prefix_sum(only(values)), is_signed=True)

    return scan(values)


def ones_of(words: jax.Array, interpret: Any) -> jax.Array:
    """Returns the number of ones among the bits of each integer."""
    if interpret is not None:
        return lax.population_count(words)

    @inline(LAYOUT, returns=plgpu.ShapeDtypeStruct(SHAPE, jnp.int32, layout=LAYOUT))
    def count(words: Registers) -> Registers:
        ones = asm("popc.b32 $0, $1;", "=r,r", only(words), result=i32())
        return per_thread(ones, is_signed=True)

    return count(words)


def select(values: jax.Array, mask: jax.Array | bool, other: int) -> jax.Array:
    """Returns ``values`` where ``mask``, and ``other`` elsewhere: a constant must be the second
    operand. If it is the first, Mosaic GPU drops the result's sign, and later comparisons are
    unsigned."""
    return jnp.where(mask, values, other)


def filled(n: int) -> jax.Array:
    """Returns n in all lanes."""
    return plgpu.layout_cast(jnp.full(SHAPE, n, jnp.int32), LAYOUT)


def bits_of(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def add_if(mask: jax.Array, count: jax.Array) -> jax.Array:
    """Returns ``count + 1`` where ``mask``, and ``count`` elsewhere. To add the mask as an integer,
    Mosaic GPU would start ptxas each time it lowers a conversion from one bit, which takes 7 ms."""
    return jnp.where(mask, count + 1, count)


def load(ref: Ref, index: jax.Array, n: int, interpret: Any) -> jax.Array:
    """Returns ``ref[index]`` in the first n lanes of each warp, undefined in others. The index must
    be valid in all lanes."""
    if interpret is not None:
        rows = [jnp.stack([ref[index[warp, lane]] for lane in range(n)]) for warp in range(WARPS)]
        return jnp.pad(jnp.stack(rows), ((0, 0), (0, LANES - n)))

    @inline(REF, LAYOUT, returns=plgpu.ShapeDtypeStruct(SHAPE, ref.dtype, layout=LAYOUT))
    def read(ref: ir.Value, index: Registers) -> Registers:
        integer = isinstance(ir.MemRefType(ref.type).element_type, ir.IntegerType)
        kind, letter = (i32(), "r") if integer else (f32(), "f")
        space, start, start_letter, address = _memory(ref, "$1", "$2")
        text = f"{{ {address} ld.{space}.b32 $0, [at]; }}"
        kinds = f"={letter},{start_letter},r"
        result = asm(text, kinds, start, only(index), result=kind, effects=True)
        return per_thread(result, is_signed=True if integer else None)

    return read(ref, index)


def load_rows(ref: Ref, first: jax.Array, n: int, interpret: Any) -> jax.Array:
    """Loads ``ref[first:][:n]`` in each warp, where n is LANES, or 1 for the same number in all
    lanes. ``first`` is equal in all lanes of a warp."""
    if interpret is not None:
        rows = [ref[pl.ds(first[warp, 0], n)] for warp in range(WARPS)]
        return jnp.broadcast_to(jnp.stack(rows), SHAPE)
    return load(ref, first if n == 1 else first + thread_index(1), LANES, interpret)


def load_padded(ref: Ref, first: jax.Array, n: int, padding: float, interpret: Any) -> jax.Array:
    """Loads ``ref[first:][:n]`` in each warp, for n up to LANES; later lanes have ``padding``.
    ``first`` is equal in all lanes of a warp."""
    if n == LANES:
        return load_rows(ref, first, n, interpret)
    lane = thread_index(1)
    return jnp.where(lane < n, load(ref, first + jnp.minimum(lane, n - 1), n, interpret), padding)


def store(ref: Ref, index: jax.Array, values: jax.Array, mask: jax.Array, interpret: Any) -> None:
    """Sets ``ref[index] = values``, in the threads where ``mask``."""
    if interpret is not None:
        for warp in range(WARPS):
            for lane in range(LANES):

                @when(mask[warp, lane])
                def _(at: tuple[int, int] = (warp, lane)) -> None:
                    ref[index[at]] = values[at]

        return
    _write("st.{space}", ref, index, values, mask)


def set_bits(
    ref: Ref, index: jax.Array, bits: jax.Array, n: int, mask: jax.Array, interpret: Any
) -> None:
    """Sets ``bits`` in ``ref[index]`` in the first n lanes of each warp, where ``mask``. Threads of
    a warpgroup may set bits of the same word."""
    if interpret is None:
        mask = mask if n == LANES else mask & (thread_index(1) < n)
        _write("red.{space}.or", ref, index, bits, mask)
        return
    for warp in range(WARPS):
        for lane in range(n):

            @when(mask[warp, lane])
            def _(at: tuple[int, int] = (warp, lane)) -> None:
                ref[index[at]] = ref[index[at]] | bits[at]


def _write(
    instruction: str, ref: Ref, index: jax.Array, values: jax.Array, mask: jax.Array
) -> None:
    @inline(REF, LAYOUT, LAYOUT).on(ref, jnp.where(mask, index, -1), values)
    def _(ref: ir.Value, index: Registers, values: Registers) -> None:
        space, start, letter, address = _memory(ref, "$0", "$1")
        operation = instruction.format(space=space)
        text = f"""{{
            .reg .pred there;
            setp.ge.s32 there, $1, 0;
            {address}
            @there {operation}.b32 [at], $2;
        }}"""
        value = llvm.bitcast(i32(), only(values))
        asm(text, f"{letter},r,r,~{{memory}}", start, only(index), value, effects=True)


def store_rows(
    ref: Ref, first: jax.Array, values: jax.Array, n: int, mask: jax.Array, interpret: Any
) -> None:
    """Sets ``ref[first:][:n] = values[:n]`` in each warp where ``mask``. ``first`` and ``mask`` are
    equal in all lanes of a warp."""
    if interpret is None:
        lane = thread_index(1)
        store(ref, first + lane, values, mask if n == LANES else mask & (lane < n), interpret)
        return
    for warp in range(WARPS):

        @when(mask[warp, 0])
        def _(warp: int = warp) -> None:
            ref[pl.ds(first[warp, 0], n)] = values[warp, :n]


def maximum(values: list[jax.Array]) -> jax.Array:
    """Returns the elementwise maximum of several arrays."""
    return functools.reduce(jnp.maximum, values)


def _memory(ref: Ref, start: str, index: str) -> tuple[str, Any, str, str]:
    """Describes a ref for inline PTX: its state space; the address of the first element and the
    letter of its kind; and PTX that sets a register ``at`` to the address of an element."""
    if mgpu.utils.is_smem_ref(ref):
        address = f".reg .b32 at; mad.lo.s32 at, {index}, 4, {start};"
        return "shared", shared_address(ref), "r", address
    address = f".reg .b64 at; mad.wide.s32 at, {index}, 4, {start};"
    return "global", global_address(ref), "l", address


def only(values: Registers) -> ir.Value:
    """Returns the register of a thread's only number."""
    return llvm.extractelement(values.registers.item(), const(0))


def per_thread(number: ir.Value, is_signed: bool | None = None) -> Registers:
    """Inverts :func:`only`."""
    return array([single(number)], SHAPE, LAYOUT, is_signed=is_signed)
