"""Weights of eight or four bits, converted to bfloat16 in registers."""

from __future__ import annotations

from typing import Any, Literal

from pallas_kernels.hopper.ir import asm, i32

Format = Literal["int8", "int4", "float8"]

# Spread bytes 0 and 1, or 2 and 3, over both halves of a word.
_NEIGHBOURS = ("prmt.b32 $0, $1, 0, 0x4140;", "prmt.b32 $0, $1, 0, 0x4342;")


def to_bfloat16(word: Any, form: Format) -> list[Any]:
    """Converts all values of a 32-bit word to pairs of bfloat16.

    int8 and float8_e4m3fn give the pairs of bytes (0, 2) and (1, 3); int4 the pairs of half bytes
    (0, 4), (1, 5), (2, 6) and (3, 7).
    """
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
