"""Branches, synchronisation of threads, and what depends on a thread's warp.

``pl.when`` and ``lax.cond`` convert the condition from a bit to an integer. For such a conversion
Mosaic GPU starts a process that asks ptxas for its version. That takes 15 milliseconds, and a step
of the serving engine has up to 200. In :func:`when` and :func:`cond` the integer is selected
instead, and the machine code is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, nvvm

from pallas_kernels.hopper.ir import SCALAR, Registers, asm, const, i32, inline, instruction


def when(condition: jax.Array | bool) -> Callable[[Callable[[], None]], None]:
    """Runs the decorated function if the condition holds, as ``pl.when`` does."""

    def run(function: Callable[[], None]) -> None:
        if not isinstance(condition, bool):
            lax.switch(jnp.where(condition, 1, 0), [lambda: None, function])
        elif condition:
            function()

    return run


def cond(
    condition: jax.Array | bool,
    if_true: Callable[..., Any],
    if_false: Callable[..., Any],
    *operands: Any,
) -> Any:
    """Returns the result of one of two functions of the operands, as ``lax.cond`` does."""
    return lax.switch(jnp.where(condition, 1, 0), [if_false, if_true], *operands)


WARPS = 4  # warps per warpgroup

# One hardware barrier per warpgroup. Of the sixteen, Mosaic uses barrier 0 and one per warpgroup.
_FIRST_VOTE_BARRIER = 8
_VOTE = """{
    .reg .pred p, any;
    setp.ne.b32 p, $2, 0;
    bar.red.or.pred any, $1, 128, p;
    selp.b32 $0, 1, 0, any;
}"""


def first_warp(on_gpu: bool) -> jax.Array | bool:
    """Returns whether the thread is in its warpgroup's first warp; True in the interpreter, which
    has no warps."""
    return warp_is(0) if on_gpu else True


def warp_is(number: int) -> jax.Array:
    """Returns whether the thread is in warp ``number`` of its warpgroup."""

    @inline(returns=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=SCALAR))
    def compare() -> Registers:
        warp = arith.remui(mgpu.utils.warp_idx(), const(4))
        equal = arith.cmpi(arith.CmpIPredicate.eq, warp, const(number))
        return mgpu.FragmentedArray.splat(equal, (), is_signed=False)

    return compare()


def any_thread(flag: Any) -> Any:
    """Returns whether ``flag`` is set in any thread of the warpgroup. All threads call it: it is a
    barrier with a reduction."""
    warpgroup = arith.divui(mgpu.utils.thread_idx(), const(128))
    barrier = arith.addi(warpgroup, const(_FIRST_VOTE_BARRIER))
    flag = arith.extui(i32(), flag)
    voted = asm(_VOTE, "=r,r,r,~{memory}", barrier, flag, result=i32(), effects=True)
    return arith.cmpi(arith.CmpIPredicate.ne, voted, const(0))


def sync_warpgroup(interpret: Any = None) -> None:
    """Synchronises the threads of a warpgroup. wgmma and TMA may not see yet what the threads have
    written: there is no fence for the asynchronous proxy."""
    if interpret is not None:
        plgpu.commit_smem()
        return
    inline()(mgpu.utils.warpgroup_barrier)()


def fence_async_proxy(interpret: Any = None) -> None:
    """Makes this thread's shared memory writes visible to the tensor cores and to TMA:
    ``commit_smem`` without its barrier across the warpgroup."""
    if interpret is not None:
        plgpu.commit_smem()
        return

    @inline().on()
    def _():
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)


def sync_cta(barriers: Sequence[Any], interpret: Any) -> None:
    """Synchronises all threads of a CTA, and makes their memory writes visible to each other. The
    interpreter uses the first of ``barriers`` instead."""
    if interpret is not None:
        plgpu.barrier_arrive(barriers[0])
        plgpu.barrier_wait(barriers[0])
        return
    inline()(lambda: instruction("barrier.cta.sync.aligned 0;"))()


def sync_cluster(barriers: Sequence[Any], interpret: Any) -> None:
    """Does :func:`sync_cta` for a cluster. The interpreter uses the last of ``barriers``."""
    if interpret is not None:
        plgpu.barrier_arrive(barriers[-1])
        plgpu.barrier_wait(barriers[-1])
        return

    def sync() -> None:
        instruction("barrier.cluster.arrive.release.aligned;")
        instruction("barrier.cluster.wait.acquire.aligned;")

    inline()(sync)()
