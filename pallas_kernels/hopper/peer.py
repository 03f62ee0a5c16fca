"""Copies from shared memory to that of the other program of a cluster of two."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith

from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.ir import REF, SCALAR, asm, const, inline, shared_address, word
from pallas_kernels.hopper.tiles import TILES
from pallas_kernels.hopper.warpgroup import WARPS

# Bytes at $0 go to the same address of the other program. Its barrier at the address $1 gets an
# arrival that announces them, so the other program need not know of the copy beforehand. One
# lane ($2) issues both.
_SEND = """{
    .reg .b32 program, target, barrier;
    mov.u32 program, %cluster_ctarank;
    xor.b32 program, program, 1;
    mapa.shared::cluster.u32 target, $0, program;
    mapa.shared::cluster.u32 barrier, $1, program;
    @$2 mbarrier.arrive.expect_tx.shared::cluster.b64 _, [barrier], BYTES;
    @$2 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
        [target], [$0], BYTES, [barrier];
}"""


def send_quarter(tiles: Any, quarter_bytes: int, barriers: Barriers, i: Any) -> None:
    """Sends a warp's quarter of a buffer, signalled on barrier ``i`` of the other program.

    The quarter of the calling warp must be published (:func:`warpgroup.publish`) by all its lanes,
    which have met since. The copies of four warps are ``WARPS`` arrivals. The buffer may be written
    again when the other program has waited for the barrier. Not for the interpreter, in which a
    program has no access to another's memory.

    Args:
      tiles: bfloat16 tiles, contiguous in shared memory, at the same address in both programs.
      quarter_bytes: a multiple of 16.
    """

    @inline(TILES, REF, SCALAR)
    def send(tiles: Any, words: Any, barrier: Any) -> None:
        warp = arith.remui(mgpu.utils.warp_idx(), const(WARPS))
        source = arith.addi(shared_address(tiles), arith.muli(warp, const(quarter_bytes)))
        barrier = arith.addi(shared_address(words), arith.shli(word(barrier), const(3)))
        leader = mgpu.single_thread_predicate(mgpu.ThreadSubset.WARP)
        text = _SEND.replace("BYTES", str(quarter_bytes))
        asm(text, "r,r,b,~{memory}", source, barrier, leader, effects=True)

    send(tiles, barriers.memory, jnp.asarray(i, jnp.int32))
