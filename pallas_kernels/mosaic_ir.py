"""Registers and instructions below Pallas, for functions inlined with ``plgpu.inline_mgpu``.

Such a function is code of a single thread. A scalar or array argument is the registers of that
thread which hold it, in the order that its layout defines.
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
"""Layout of a scalar, which every thread has."""

REF = plgpu.RefType()
"""Type of a reference to memory, without transforms."""

# One hardware barrier per warpgroup. Of the sixteen, Mosaic uses barrier 0 and one per warpgroup.
_FIRST_VOTE_BARRIER = 8
_VOTE = """{
    .reg .pred p, any;
    setp.ne.b32 p, $2, 0;
    bar.red.or.pred any, $1, 128, p;
    selp.b32 $0, 1, 0, any;
}"""


def inline(*arguments: Any, returns: Any = None) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a function as plgpu.inline_mgpu does, but without the launch context argument.

    Args:
      arguments: types or layouts of the function's arguments.
      returns: type of its result, or a tuple of types.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        inlined = plgpu.inline_mgpu(arg_types=arguments, return_type=returns)
        return inlined(lambda _, *args: function(*args))

    return decorate


def i32() -> Any:
    return ir.IntegerType.get_signless(32)


def i64() -> Any:
    return ir.IntegerType.get_signless(64)


def const(number: int) -> Any:
    """Returns an i32 constant."""
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), number))


def word(scalar: Any) -> Any:
    """Returns the register of a scalar."""
    return scalar.registers.flat[0]


def asm(text: str, constraints: str, *args: Any, result: Any = None, effects: bool = False) -> Any:
    """Emits inline PTX and returns its result.

    Args:
      text: PTX with operands $0, $1, ...
      constraints: LLVM's operand constraints, such as ``"=r,r"``.
      result: MLIR type of the result, or None.
      effects: whether the compiler must neither move nor remove it.
    """
    return llvm.inline_asm(
        result, list(args), text, constraints, asm_dialect=0, has_side_effects=effects
    )


def instruction(text: str, *args: Any) -> None:
    """Emits inline PTX without a result, which is also a compiler fence for memory."""
    constraints = ",".join(["r"] * len(args) + ["~{memory}"])
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, list(args), text, constraints, has_side_effects=True)


def warp_and_lane() -> tuple[Any, Any]:
    """Returns the index of the thread's warp in its warpgroup, and of its lane in the warp."""
    thread = mgpu.utils.thread_idx()
    return arith.andi(arith.shrui(thread, const(5)), const(3)), arith.andi(thread, const(31))


def wgmma_row() -> Any:
    """Returns the first of the thread's two rows of a wgmma tile. The second is 8 further on."""
    warp, lane = warp_and_lane()
    return arith.addi(arith.muli(warp, const(16)), arith.shrui(lane, const(2)))


def first_warp(on_gpu: bool) -> jax.Array | bool:
    """Returns whether the thread is in its warpgroup's first warp.

    The interpreter has no warps. There the result is True.
    """
    return warp_is(0) if on_gpu else True


def warp_is(number: int) -> jax.Array:
    """Returns whether the thread is in warp ``number`` of its warpgroup."""

    @inline(returns=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=SCALAR))
    def compare() -> Any:
        warp = arith.remui(mgpu.utils.warp_idx(), const(4))
        equal = arith.cmpi(arith.CmpIPredicate.eq, warp, const(number))
        return mgpu.FragmentedArray.splat(equal, (), is_signed=False)

    return compare()


def any_thread(flag: Any) -> Any:
    """Returns whether ``flag`` is set in any thread of the warpgroup. All its threads must call it.

    It is a barrier with a reduction.
    """
    warpgroup = arith.divui(mgpu.utils.thread_idx(), const(128))
    barrier = arith.addi(warpgroup, const(_FIRST_VOTE_BARRIER))
    flag = arith.extui(i32(), flag)
    voted = asm(_VOTE, "=r,r,r,~{memory}", barrier, flag, result=i32(), effects=True)
    return arith.cmpi(arith.CmpIPredicate.ne, voted, const(0))


def meet(interpret: Any = None) -> None:
    """Synchronises the threads of a warpgroup, without a fence for the asynchronous proxy.

    So wgmma and TMA may not see yet what the threads have written to shared memory.
    """
    if interpret is not None:
        plgpu.commit_smem()
        return
    inline()(mgpu.utils.warpgroup_barrier)()


def array(
    registers: list[Any], shape: tuple[int, ...], layout: Any, is_signed: bool | None = None
) -> mgpu.FragmentedArray:
    """Makes an array of a thread's registers, which are in the layout's order."""
    layout = layout.to_mgpu()
    flat = np.empty(len(registers), dtype=object)
    flat[:] = registers
    return mgpu.FragmentedArray(
        _registers=flat.reshape(layout.registers_shape(shape)),
        _layout=layout,
        _is_signed=is_signed,
    )


def barrier_at(words: Any, i: Any) -> mgpu.BarrierRef:
    """Returns the i-th mbarrier of an array in shared memory, of two words each.

    It does not track phases: the caller passes the parity to each wait.
    """
    phases: Any = None
    return mgpu.BarrierRef(mgpu.utils.memref_ptr(words), i, phases, 1)


def wait_parity(words: Any, barrier: jax.Array, phase: jax.Array) -> None:
    """Waits until the phase of an mbarrier is complete.

    Args:
      words: mbarriers of two words each in shared memory.
      barrier: index of the barrier.
      phase: number of the phase. Only its parity counts.
    """

    @inline(REF, SCALAR, SCALAR)
    def wait(words: Any, barrier: Any, phase: Any) -> None:
        odd = arith.trunci(ir.IntegerType.get_signless(1), word(phase))
        barrier_at(words, word(barrier)).wait_parity(odd)

    wait(words, barrier, phase)


def arrive_per_warp(words: Any, barrier: jax.Array) -> None:
    """Arrives at an mbarrier once per warp, after all lanes of the warp have come here."""

    @inline(REF, SCALAR)
    def arrive(words: Any, barrier: Any) -> None:
        instruction("bar.warp.sync 0xffffffff;")
        lane = mgpu.single_thread_predicate(mgpu.ThreadSubset.WARP)
        barrier_at(words, word(barrier)).arrive(predicate=lane)

    arrive(words, barrier)


def starts_and_sizes(window: Sequence[Any]) -> tuple[list[jax.Array], list[int | None]]:
    """Returns a window's start and size along each dimension. The size of an index is None.

    Args:
      window: an index or a ``pl.ds`` for each dimension.
    """
    slices = [each if isinstance(each, pl.Slice) else None for each in window]
    starts = [each if cut is None else cut.start for each, cut in zip(window, slices, strict=True)]
    sizes: Any = [None if cut is None else cut.size for cut in slices]
    return [jnp.asarray(start, jnp.int32) for start in starts], sizes


def copy_window(
    context: Any, source: Any, starts: Sequence[Any], sizes: Sequence[int | None], target: Any,
    **options: Any,
) -> None:  # fmt: skip
    """Starts a TMA copy of a window of ``source`` to shared memory.

    The caller has already announced its bytes to the barrier.

    Args:
      starts, sizes: the window, as from :func:`starts_and_sizes`.
      options: further arguments of ``LaunchContext.async_copy``, such as the barrier.
    """
    indices = [arith.index_cast(ir.IndexType.get(), word(start)) for start in starts]
    window = [
        index if size is None else mgpu.ds(index, size)
        for index, size in zip(indices, sizes, strict=True)
    ]
    context.async_copy(
        src_ref=source, dst_ref=target, gmem_slice=tuple(window), arrive=False, **options
    )
