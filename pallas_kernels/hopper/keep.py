"""Keeps the register operands of a wgmma live until the tensor cores have read them."""

from __future__ import annotations

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import llvm

from pallas_kernels.hopper.ir import asm, i32, inline


def keep(*operands: jax.Array) -> None:
    """Keeps the operands in their registers up to this point.

    It adds stores that are never executed, but that ptxas cannot prove dead. The registers are used
    in groups of four, as wgmma uses them.
    """

    @inline(*(plgpu.Layout.WGMMA for _ in operands))
    def use(*operands):
        words = [llvm.bitcast(i32(), r) for a in operands for r in a.registers.flat]
        fours = range(0, len(words), 4)
        stores = [f"st.global.v4.b32 [a], {{${i}, ${i + 1}, ${i + 2}, ${i + 3}}};" for i in fours]
        text = [
            "{ .reg .b32 z; .reg .pred p; .reg .b64 a;",
            "mov.u32 z, %nctaid.z;",  # the grid has one block along z, so the branch is taken
            "setp.ne.u32 p, z, 77;",
            "@p bra.uni HELD;",
            "mov.b64 a, 0;",
            *stores,
            "HELD: }",
        ]
        asm("\n".join(text), ",".join(["r"] * len(words)), *words, effects=True)

    use(*operands)
