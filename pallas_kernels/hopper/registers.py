"""Register access for inlined code: addresses, loads, and sums over a warp's lanes."""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.hopper.ir import asm, const, i32

_ALL_LANES = "0xffffffff"
# Adds the number of the lane DISTANCE before this one, if there is one.
_SCAN_STEP = f"""{{
    .reg .pred p;
    .reg .b32 x, other;
    mov.b32 x, $1;
    shfl.sync.up.b32 other|p, x, DISTANCE, 0, {_ALL_LANES};
    @p add.s32 x, x, other;
    mov.b32 $0, x;
}}"""


def advance(pointer: Any, count: Any) -> Any:
    """Returns ``pointer`` advanced by ``count`` bytes."""
    return mgpu.utils.getelementptr(pointer, [count], ir.IntegerType.get_signless(8))


def load_words(pointer: Any) -> list[Any]:
    """Loads four 32-bit words from a multiple of 16 bytes."""
    loaded = llvm.load(ir.VectorType.get((4,), i32()), pointer, alignment=16)
    return [llvm.extractelement(loaded, const(i)) for i in range(4)]


def warp_sum(number: Any) -> Any:
    """Returns the sum of an int32 of each lane of the warp."""
    return _of_warp(f"redux.sync.add.s32 $0, $1, {_ALL_LANES};", number)


def last_lane(number: Any) -> Any:
    """Returns the number of the warp's last lane."""
    return _of_warp(f"shfl.sync.idx.b32 $0, $1, 31, 31, {_ALL_LANES};", number)


def prefix_sums(values: list[Any]) -> list[Any]:
    """Returns inclusive prefix sums over the lanes, of each value separately.

    The scans are interleaved, because one step has a long latency.
    """
    for distance in (1, 2, 4, 8, 16):
        values = [_of_warp(_SCAN_STEP.replace("DISTANCE", str(distance)), x) for x in values]
    return values


def _of_warp(text: str, number: Any) -> Any:
    return asm(text, "=r,r", number, result=i32(), effects=True)
