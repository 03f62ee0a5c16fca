"""What kernels say to Mosaic GPU below Pallas: constants, registers, instructions.

For functions that :func:`plgpu.inline_mgpu` inlines: to them a scalar or an array is the registers
of one thread that hold it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

SCALAR = plgpu.Layout.WG_SPLAT(())
"""The layout of a number that all threads hold."""


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
