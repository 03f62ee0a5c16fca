"""A barrier across all CTAs of a grid, for kernels whose phases depend on each other.

The CTAs wait for each other, so all must run at once. A grid of at most one CTA per
multiprocessor does, whatever ran before it: earlier kernels end, and free their multiprocessors.
Two kernels that wait like this must not run at the same time, because each might have some of the
multiprocessors that the other needs. Kernels that share a counter cannot: XLA orders them by it.

The counter is one word of global memory. In each use of the barrier, the CTAs add 2**31 in
all, which flips its top bit; a CTA waits until that bit differs from what it saw when it
arrived. Sums wrap around, so that the counter is never reset: not between uses, not between
launches, and not after 2**32 arrivals. A wait is bounded. At its end the kernel prints a message
and traps, so that a missing CTA is an error rather than a hang.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, scf
from jaxtyping import Array, Int32

from pallas_kernels.hopper.ir import (
    INT32,
    REF,
    SCALAR,
    Registers,
    asm,
    const,
    global_address,
    i32,
    inline,
    instruction,
    scalar,
    value_of,
)
from pallas_kernels.hopper.launch import Index, Ref, multiprocessors

FLIP = 1 << 31  # sum of all arrivals of one use of the barrier

MOST_POLLS = 1 << 22
"""Polls of the counter until a wait ends with a trap. A poll takes about 0.4 microseconds, so that
this is more than a second, and no phase of a kernel takes a thousandth of that."""

_BARRIER = 12  # hardware barrier of the CTAs' warpgroups; see warpgroup for those in use

# The leader ($3) adds $2 to the counter. Who sees that also sees what its CTA wrote before.
_ARRIVE = """{
    .reg .pred there;
    mov.u32 $0, 0;
    setp.ne.u32 there, $3, 0;
    @there atom.add.release.gpu.global.u32 $0, [$1], $2;
}"""

# The leader ($3) polls until the top bit differs from that of $2, with relaxed loads. An acquiring
# load invalidates the L1 cache, so there is only one, at the end. $0 is 1 if $4 polls were too few.
_WAIT = """{
    .reg .pred there, seen;
    .reg .b32 now, left;
    mov.u32 $0, 0;
    setp.ne.u32 there, $3, 0;
    @!there bra DONE;
    mov.u32 left, $4;
  POLL:
    ld.relaxed.gpu.global.u32 now, [$1];
    xor.b32 now, now, $2;
    setp.lt.s32 seen, now, 0;
    @seen bra SEEN;
    sub.u32 left, left, 1;
    setp.ne.u32 there, left, 0;
    @there bra POLL;
    mov.u32 $0, 1;
  SEEN:
    ld.acquire.gpu.global.u32 now, [$1];
  DONE:
}"""


def arrival(cta: int, ctas: int) -> int:
    """Returns what a CTA adds to the counter, as an int32. CTA 0 adds the rest to FLIP."""
    return int(np.uint32(FLIP - (ctas - 1) if cta == 0 else 1).astype(np.int32))


def new_counter() -> Int32[Array, 1]:
    """Returns the initial counter. Later kernels may use it as earlier ones left it."""
    return jnp.zeros((1,), jnp.int32)


def check_ctas(ctas: int, interpret: Any = None) -> None:
    """Raises NotImplementedError if there are more CTAs than multiprocessors, because then some
    start only when others have ended. The interpreter runs any number at the same time."""
    if interpret is None and ctas > (available := multiprocessors()):
        raise NotImplementedError(
            f"a grid barrier takes at most {available} programs, one per multiprocessor, got"
            f" {ctas}: some would start only after others have ended"
        )


@dataclasses.dataclass(frozen=True)
class GridBarrier:
    """A barrier across the CTAs of a grid of one dimension, ``cta``."""

    memory: Ref
    """Reference to a counter in global memory, or in the interpreter to a cluster barrier."""
    ctas: int
    warpgroups: int  # consecutive warpgroups of each CTA that take part
    most_polls: int = MOST_POLLS
    interpret: Any = None

    @staticmethod
    def launch(ctas: int, interpret: Any) -> dict[str, dict[str, int]]:
        """Returns the arguments of :func:`grid_kernel` for the grid; see :func:`check_ctas`. The
        interpreter runs only the CTAs of one cluster at the same time, so there the grid is a
        cluster."""
        check_ctas(ctas, interpret)
        if interpret is None:
            return {"grid": {"cta": ctas}}
        return {"grid": {"one": 1}, "cluster": {"cta": ctas}}

    @staticmethod
    def scratch(warpgroups: int, interpret: Any) -> list[Any]:
        """Returns the scratch types: ``memory`` in the interpreter, nothing on a GPU."""
        if interpret is None:
            return []
        return [plgpu.ClusterBarrier(collective_axes=("cta",), num_arrivals=warpgroups)]

    def sync(self) -> None:
        """Waits until all threads that take part have come here, in all CTAs. They then see what
        any of them wrote to global memory before, by ordinary loads and not by ``ld.global.nc``."""
        self.wait(self.arrive())

    def arrive(self) -> Any:
        """Announces this CTA to the others, when all threads that take part have come here. Returns
        a token for :meth:`wait`."""
        if self.interpret is not None:
            plgpu.barrier_arrive(self.memory)
            return jnp.int32(0)
        first, other = (jnp.int32(arrival(cta, self.ctas)) for cta in range(2))
        amount = jnp.where(lax.axis_index("cta") == 0, first, other)

        @inline(REF, SCALAR, returns=INT32)
        def arrive(counter: ir.Value, amount: Registers) -> Registers:
            self._meet()
            operands = global_address(counter), value_of(amount), self._is_leader()
            constraints = "=&r,l,r,r,~{memory}"
            return scalar(asm(_ARRIVE, constraints, *operands, result=i32(), effects=True))

        return arrive(self.memory, amount)

    def wait(self, token: Index) -> None:
        """Waits for the CTAs' arrivals. Threads then see what was written before these."""
        if self.interpret is not None:
            plgpu.barrier_wait(self.memory)
            return

        @inline(REF, SCALAR).on(self.memory, token)
        def _(counter: ir.Value, token: Registers) -> None:
            operands = global_address(counter), value_of(token), self._is_leader()
            operands = *operands, const(self.most_polls)
            constraints = "=&r,l,r,r,r,~{memory}"
            self._trap_if(asm(_WAIT, constraints, *operands, result=i32(), effects=True))
            self._meet()

    def _meet(self) -> None:
        instruction(f"bar.sync {_BARRIER}, {128 * self.warpgroups};")

    def _is_leader(self) -> ir.Value:
        thread = mgpu.utils.thread_idx()
        return arith.extui(i32(), arith.cmpi(arith.CmpIPredicate.eq, thread, const(0)))

    def _trap_if(self, late: ir.Value) -> None:
        """Ends the kernel with a message in threads where ``late`` is not zero."""
        is_late = arith.cmpi(arith.CmpIPredicate.ne, late, const(0))
        with ir.InsertionPoint(scf.IfOp(is_late).then_block):
            message = (
                f"grid barrier: after {self.most_polls} polls, program %d still waits for some of"
                f" {self.ctas} programs\n"
            )
            gpu.printf(message, arith.index_cast(i32(), gpu.block_id(gpu.Dimension.x)))
            instruction("trap;")
            scf.yield_([])
