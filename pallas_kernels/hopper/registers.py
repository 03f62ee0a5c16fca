"""Registers of inlined code: loads, sums over a warp's lanes, conversions and approximations."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels.hopper.ir import array, asm, const, float_pair, i32, inline, item
from pallas_kernels.hopper.tiles import WGMMA

Format = Literal["int8", "int4", "float8"]  # of weights

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
# Spread bytes 0 and 1, or 2 and 3, over both halves of a word.
_NEIGHBOURS = ("prmt.b32 $0, $1, 0, 0x4140;", "prmt.b32 $0, $1, 0, 0x4342;")
_SIGMOID = """{
    .reg .f32 t;
    mul.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 $0, t;
}"""  # the constants are -log2(e) and 1


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


def to_bfloat16(word: Any, form: Format) -> list[Any]:
    """Converts all values of a 32-bit word to pairs of bfloat16: bytes (0, 2) and (1, 3), and of
    int4 the half bytes (0, 4), (1, 5), (2, 6) and (3, 7)."""
    # The constants are pairs of bfloat16. 0x4300 is 128, whose last mantissa bit is worth 1, so
    # that OR with an integer below 128 adds it.
    if form == "int8":
        # The low 7 bits are added to 128. Then 128 is subtracted, or 256 of a negative integer.
        shifts = 0, 8
        text = """{
            .reg .b32 w, a, b;
            shr.u32 w, $1, SHIFT;
            lop3.b32 a, w, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 b, w, 0x00800080, 0x43004300, 0xEA;
            sub.rn.bf16x2 $0, a, b;
        }"""
    elif form == "int4":
        # Flipping the top bit adds 8. The result is added to 128, and 136 is subtracted.
        shifts = 0, 4, 8, 12
        text = """{
            .reg .b32 w, a, b;
            shr.u32 w, $1, SHIFT;
            lop3.b32 a, w, 0x000F000F, 0x43084308, 0x6A;
            mov.b32 b, 0x43084308;
            sub.rn.bf16x2 $0, a, b;
        }"""
    else:
        # Exponent and mantissa, shifted to their positions in a bfloat16, are 2^-120 times the
        # number.
        shifts = 8, 0
        text = """{
            .reg .b32 w, a, b, s;
            shl.b32 w, $1, SHIFT;
            shr.u32 a, w, 4;
            and.b32 a, a, 0x07F007F0;
            lop3.b32 b, w, 0x80008000, a, 0xEA;
            mov.b32 s, 0x7B807B80;
            mul.rn.bf16x2 $0, b, s;
        }"""
    return [asm(text.replace("SHIFT", str(n)), "=r,r", word, result=i32()) for n in shifts]


def neighbours_to_bfloat16(word: Any, form: Format) -> list[Any]:
    """Converts the bytes of a word, int8 or float8_e4m3fn, to the pairs (0, 1) and (2, 3)."""
    return [to_bfloat16(asm(text, "=r,r", word, result=i32()), form)[0] for text in _NEIGHBOURS]


def approximate_sigmoid(x: jax.Array, *, on_gpu: bool) -> jax.Array:
    """Returns ``1 / (1 + exp(-x))`` in four instructions, with a relative error of some 2^-21.

    The exact exponential and division take about twenty. Two of the four are those of special
    function units, which take eight cycles for a warp, as many as all others together.

    Args:
      x: float32 [64, columns] in the WGMMA layout.
    """
    if not on_gpu:
        return 1 / (1 + jnp.exp(-x))
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=WGMMA)

    @inline(WGMMA, returns=result)
    def sigmoid(x):
        f32, pairs = ir.F32Type.get(), x.registers.flat
        results = [
            [asm(_SIGMOID, "=f,f", item(pair, i), result=f32) for i in range(2)] for pair in pairs
        ]
        return array([float_pair(*both) for both in results], x.shape, WGMMA)

    return sigmoid(x)
