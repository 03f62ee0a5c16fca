"""What kernels say to Mosaic GPU below Pallas: constants, registers, instructions.

For functions that :func:`plgpu.inline_mgpu` inlines: to them a scalar or an array is the registers
of one thread that hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

SCALAR = plgpu.Layout.WG_SPLAT(())
"""The layout of a number that all threads hold."""

REF = plgpu.RefType()

_FIRST_VOTE = 8  # of the sixteen hardware barriers; Mosaic uses one, and one a warpgroup
_VOTE = """{
    .reg .pred p, any;
    setp.ne.b32 p, $2, 0;
    bar.red.or.pred any, $1, 128, p;
    selp.b32 $0, 1, 0, any;
}"""


def inline(*arguments: Any, returns: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """plgpu.inline_mgpu for functions that ask nothing of the launch context."""

    def decorate(function: Callable[..., Any]) -> Any:
        inlined = plgpu.inline_mgpu(arg_types=arguments, return_type=returns)
        return inlined(lambda _, *args: function(*args))

    return decorate


def i32() -> Any:
    return ir.IntegerType.get_signless(32)


def i64() -> Any:
    return ir.IntegerType.get_signless(64)


def const(number: int) -> Any:
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), number))


def word(scalar: Any) -> Any:
    """The register of a scalar."""
    return scalar.registers.flat[0]


def asm(text: str, constraints: str, *args: Any, result: Any = None, effects: bool = False) -> Any:
    """PTX that gives ``result``; ``effects`` keeps it where it stands."""
    return llvm.inline_asm(
        result, list(args), text, constraints, asm_dialect=0, has_side_effects=effects
    )


def instruction(text: str, *args: Any) -> None:
    """PTX that gives nothing, and before which all of memory is written."""
    constraints = ",".join(["r"] * len(args) + ["~{memory}"])
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, list(args), text, constraints, has_side_effects=True)


def warp_and_lane() -> tuple[Any, Any]:
    """The thread's warp in its warpgroup, and its place in the warp."""
    thread = mgpu.utils.thread_idx()
    return arith.andi(arith.shrui(thread, const(5)), const(3)), arith.andi(thread, const(31))


def wgmma_row() -> Any:
    """The first of the two rows of a WGMMA tile that the thread holds; the other is 8 below."""
    warp, lane = warp_and_lane()
    return arith.addi(arith.muli(warp, const(16)), arith.shrui(lane, const(2)))


def first_warp(on_gpu: bool) -> jax.Array | bool:
    """Whether the thread is of its warpgroup's first warp; the interpreter has no warps."""
    return warp_is(0) if on_gpu else True


def warp_is(number: int) -> jax.Array:
    """Whether the thread is of its warpgroup's warp of that number."""

    @inline(returns=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=SCALAR))
    def compare() -> Any:
        warp = arith.remui(mgpu.utils.warp_idx(), const(4))
        found = arith.cmpi(arith.CmpIPredicate.eq, warp, const(number))
        return mgpu.FragmentedArray.splat(found, (), is_signed=False)

    return compare()


def any_thread(flag: Any) -> Any:
    """Whether any thread of a warpgroup, which meets, has the flag: a barrier with a reduction."""
    warpgroup = arith.divui(mgpu.utils.thread_idx(), const(128))
    barrier = arith.addi(warpgroup, const(_FIRST_VOTE))
    flag = arith.extui(i32(), flag)
    voted = asm(_VOTE, "=r,r,r,~{memory}", barrier, flag, result=i32(), effects=True)
    return arith.cmpi(arith.CmpIPredicate.ne, voted, const(0))


def meet(interpret: Any = None) -> None:
    """The threads of a warpgroup wait for each other, and for nothing else: what they write in
    shared memory may still be under way to the tensor cores' and the copies' eyes."""
    if interpret is not None:
        plgpu.commit_smem()
        return
    inline()(mgpu.utils.warpgroup_barrier)()


def array(
    registers: list[Any], shape: tuple[int, ...], layout: Any, is_signed: bool | None = None
) -> mgpu.FragmentedArray:
    """Of a thread's registers, in the layout's order."""
    layout = layout.to_mgpu()
    found = np.empty(len(registers), dtype=object)
    found[:] = registers
    return mgpu.FragmentedArray(
        _registers=found.reshape(layout.registers_shape(shape)),
        _layout=layout,
        _is_signed=is_signed,
    )


def barrier_at(words: Any, i: Any) -> mgpu.BarrierRef:
    """The i-th of barriers of two words each in shared memory; who waits knows their phases."""
    phases: Any = None
    return mgpu.BarrierRef(mgpu.utils.memref_ptr(words), i, phases, 1)


def parts_of(window: Sequence[Any]) -> tuple[list[jax.Array], list[int | None]]:
    """Where a window begins along each axis, and its size there: none for an index, else a
    ``pl.ds``'s."""
    slices = [each if isinstance(each, pl.Slice) else None for each in window]
    starts = [each if cut is None else cut.start for each, cut in zip(window, slices, strict=True)]
    sizes: Any = [None if cut is None else cut.size for cut in slices]
    return [jnp.asarray(start, jnp.int32) for start in starts], sizes


def copy_window(
    context: Any, source: Any, starts: Sequence[Any], sizes: Sequence[int | None], target: Any,
    **options: Any,
) -> None:  # fmt: skip
    """Starts TMA's copy to shared memory, whose bytes the barrier has been told of."""
    places = [arith.index_cast(ir.IndexType.get(), word(start)) for start in starts]
    window = [
        place if size is None else mgpu.ds(place, size)
        for place, size in zip(places, sizes, strict=True)
    ]
    context.async_copy(
        src_ref=source, dst_ref=target, gmem_slice=tuple(window), arrive=False, **options
    )
