"""Copies of matrix rows to shared memory, each row by a bulk copy of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.hopper.copies import TmaCopy
from pallas_kernels.hopper.ir import asm, i32, i64, shared_address, word

_EVICT_FIRST = 0x12F0000000000000  # an L2 cache policy, as createpolicy encodes it


@dataclasses.dataclass(frozen=True)
class RowCopies(TmaCopy):
    """Copies of consecutive rows' columns to shared memory, each row contiguous."""

    row_bytes: int = 0
    """Distance of the rows in shared memory."""

    def interpret(self, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(self.source.at[self.window], self.target, barrier)

    def issue(
        self, context: Any, source: Any, starts: Sequence[Any], target: Any, barrier: Any,
        leader: Any,
    ) -> None:  # fmt: skip
        strides, _ = ir.MemRefType(source.type).get_strides_and_offset()
        itemsize = jnp.dtype(self.source.dtype).itemsize
        address = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(source))
        for start, stride in zip(starts, strides, strict=True):
            step = arith.constant(i64(), ir.IntegerAttr.get(i64(), stride * itemsize))
            address = arith.addi(address, arith.muli(arith.extui(i64(), word(start)), step))
        rows = self.sizes[-2]
        # A loop: unrolled, the copies of all phases were half of the kernel's instructions, and the
        # first execution of an instruction waits for the memory. Weights leave the L2 cache first,
        # because a step reads them once.
        copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        text = f"""{{
            .reg .pred more; .reg .b32 to, left; .reg .b64 from;
            mov.b32 to, $0;
            mov.b64 from, $1;
            mov.b32 left, {rows};
        ROW:
            .pragma "nounroll";
            @$3 {copy} [to], [from], {self.bytes // rows}, [$2], $4;
            add.u32 to, to, {self.row_bytes};
            add.u64 from, from, {strides[-2] * itemsize};
            sub.u32 left, left, 1;
            setp.ne.u32 more, left, 0;
            @more bra ROW;
        }}"""
        mbarrier = llvm.ptrtoint(i32(), barrier.get_ptr())
        policy = arith.constant(i64(), ir.IntegerAttr.get(i64(), _EVICT_FIRST))
        operands = shared_address(target), address, mbarrier, leader, policy
        asm(text, "r,l,r,b,l,~{memory}", *operands, effects=True)
