"""Per-thread code of the Hopper kernel of top_k: histograms, prefix sums and scattered stores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    array,
    asm,
    const,
    i32,
    i64,
    inline,
    warp_and_lane,
    warp_prefix_sum,
)

_PER_REGISTER = 4  # numbers of a thread that are adjacent


def layout_of(size: int) -> Any:
    """Returns the layout of a vector in which each thread has groups of four adjacent numbers.

    If there are fewer than four per thread, a group has all of them.
    """
    return plgpu.Layout.WG_STRIDED((size,), vec_size=min(_PER_REGISTER, size // 128))


def add_to_histogram(histogram: Any, digits: jax.Array, *, interpret: Any) -> None:
    """Adds 1 to ``histogram[digit]`` in shared memory for each digit that is not negative."""
    if interpret is not None:
        counts = histogram[...]
        histogram[...] = counts.at[jnp.where(digits < 0, counts.size, digits)].add(1, mode="drop")
        return

    @inline(REF, layout_of(digits.size))
    def add(histogram: Any, digits: Any) -> None:
        base = _shared(histogram)
        text = """{
            .reg .pred there;
            .reg .b32 at;
            setp.ge.s32 there, $1, 0;
            shl.b32 at, $1, 2;
            add.u32 at, at, $0;
            @there red.shared.add.u32 [at], 1;
        }"""
        for digit in _numbers(digits):
            asm(text, "r,r,~{memory}", base, digit, effects=True)

    add(histogram, digits)


def scatter(target: Any, positions: jax.Array, values: jax.Array, *, interpret: Any) -> None:
    """Sets ``target[position] = value`` for positions that are not negative."""
    if interpret is not None:
        old = target[...]
        positions = jnp.where(positions < 0, old.size, positions)
        target[...] = old.at[positions].set(values, mode="drop")
        return

    @inline(REF, layout_of(values.size), layout_of(values.size))
    def store(target: Any, positions: Any, values: Any) -> None:
        is_shared = mgpu.utils.is_smem_ref(target)
        pointer = mgpu.utils.memref_ptr(target)
        base = llvm.ptrtoint(i32() if is_shared else i64(), pointer)
        space, bits, letter = ("shared", 32, "r") if is_shared else ("global", 64, "l")
        at = "mad.lo.s32 at, $1, 4, $0;" if is_shared else "mad.wide.s32 at, $1, 4, $0;"
        text = f"""{{
            .reg .pred there;
            .reg .b{bits} at;
            setp.ge.s32 there, $1, 0;
            {at}
            @there st.{space}.b32 [at], $2;
        }}"""
        for position, value in zip(_numbers(positions), _numbers(values), strict=True):
            asm(text, f"{letter},r,r,~{{memory}}", base, position, value, effects=True)

    store(target, positions, values)


def total(values: jax.Array, scratch: Any, *, interpret: Any) -> jax.Array:
    """Returns the sum of int32 numbers over a warpgroup. All its threads call it.

    Args:
      scratch: int32 [4] in shared memory, which only this warpgroup uses.
    """
    if interpret is not None:
        return jnp.sum(values, dtype=jnp.int32)
    return _scan(values, scratch)[1]


def prefix_sums(values: jax.Array, scratch: Any, *, interpret: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the numbers before each one, and the sum of all; see :func:`total`.

    Args:
      values: int32 [512], four of each thread.
    """
    if interpret is not None:
        sums = jnp.cumsum(values, dtype=jnp.int32)
        return sums - values, sums[-1]
    return _scan(values, scratch)


def _scan(values: jax.Array, scratch: Any) -> tuple[jax.Array, jax.Array]:
    """Returns exclusive prefix sums, correct if threads have one register, and the total."""
    layout = layout_of(values.size)
    number = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)
    numbers = plgpu.ShapeDtypeStruct(values.shape, jnp.int32, layout=layout)

    @inline(layout, REF, returns=(numbers, number))
    def scan(values: Any, scratch: Any) -> Any:
        own = _numbers(values)
        before = [const(0)]
        for value in own:
            before.append(arith.addi(before[-1], value))
        warp, lane = warp_and_lane()
        inclusive = warp_prefix_sum(before[-1])
        base = _shared(scratch)
        at = arith.addi(base, arith.shli(warp, const(2)))
        is_last = arith.cmpi(arith.CmpIPredicate.eq, lane, const(31))
        asm("@$2 st.shared.b32 [$0], $1;", "r,r,b,~{memory}", at, inclusive, is_last, effects=True)
        mgpu.utils.warpgroup_barrier()
        four = llvm.StructType.get_literal([i32()] * 4)
        text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
        loaded = asm(text, "=r,=r,=r,=r,r,~{memory}", base, result=four, effects=True)
        mgpu.utils.warpgroup_barrier()  # the scratch may be written again
        of_warps = [llvm.extractvalue(i32(), loaded, [i]) for i in range(4)]
        offset, all_ = arith.subi(inclusive, before[-1]), const(0)
        for i, of_warp in enumerate(of_warps):
            is_before = arith.cmpi(arith.CmpIPredicate.sgt, warp, const(i))
            offset = arith.addi(offset, arith.select(is_before, of_warp, const(0)))
            all_ = arith.addi(all_, of_warp)
        sums = [arith.addi(offset, each) for each in before[:-1]]
        kind = ir.VectorType.get((_PER_REGISTER,), i32())
        registers = [
            vector.from_elements(kind, sums[i : i + _PER_REGISTER])
            for i in range(0, len(sums), _PER_REGISTER)
        ]
        return (
            array(registers, values.shape, layout, is_signed=True),
            mgpu.FragmentedArray.splat(all_, (), is_signed=True),
        )

    return scan(values, scratch)


def ordered(scores: jax.Array) -> jax.Array:
    """Maps floats to integers in the same order; -0 becomes 0.

    The constant must not be the first operand of a select: see ``route.lanes.select``.
    """
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    bits = jnp.where(scores != 0.0, bits, jnp.zeros_like(bits))
    return jnp.where(bits < 0, bits ^ (2**31 - 1), bits)


def _numbers(values: Any) -> list[Any]:
    """Returns a thread's numbers, in order."""
    return [
        vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
        for register in values.registers.flat
        for i in range(_PER_REGISTER)
    ]


def _shared(ref: Any) -> Any:
    return llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(ref))
