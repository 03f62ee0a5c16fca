"""The former path of ``hopper.ir`` and ``hopper.warpgroup``."""

from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    array,
    asm,
    const,
    i32,
    i64,
    inline,
    instruction,
    warp_and_lane,
    wgmma_row,
    word,
)
from pallas_kernels.hopper.warpgroup import any_thread, first_warp, meet, warp_is

__all__ = [
    "REF",
    "SCALAR",
    "any_thread",
    "array",
    "asm",
    "const",
    "first_warp",
    "i32",
    "i64",
    "inline",
    "instruction",
    "meet",
    "warp_and_lane",
    "warp_is",
    "wgmma_row",
    "word",
]
