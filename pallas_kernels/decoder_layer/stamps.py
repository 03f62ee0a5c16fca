"""The clocks that a timed kernel stores."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.hopper.ir import REF, SCALAR, asm, i64, inline, word


def store_cycles(stamps: Any, index: jax.Array) -> None:
    """Stores the multiprocessor's clock, modulo 2**32."""
    _store("%clock", stamps, index)


def store_nanoseconds(stamps: Any, index: jax.Array) -> None:
    """Stores the GPU's nanoseconds, modulo 2**32. All multiprocessors have the same."""
    _store("%globaltimer_lo", stamps, index)


def _store(register: str, stamps: Any, index: jax.Array) -> None:
    """Stores a register in element ``index`` of a flat int32 array, by the first thread."""

    @inline(REF, SCALAR)
    def store(stamps: Any, index: Any) -> None:
        address = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(stamps))
        four = arith.constant(i64(), ir.IntegerAttr.get(i64(), 4))
        address = arith.addi(address, arith.muli(arith.extui(i64(), word(index)), four))
        text = f"""{{
            .reg .pred first; .reg .b32 now;
            setp.eq.u32 first, $1, 0;
            mov.u32 now, {register};
            @first st.global.b32 [$0], now;
        }}"""
        asm(text, "l,r,~{memory}", address, mgpu.utils.thread_idx(), effects=True)

    store(stamps, index)
