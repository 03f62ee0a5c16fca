"""Registers of inlined code: loads, sums over a warp's lanes, conversions and approximations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.hopper.ir import (
    SCALAR,
    Registers,
    array,
    asm,
    asm_numbers,
    const,
    element,
    f32,
    float_pair,
    i32,
    inline,
    instruction,
    item,
    value_of,
    warp_and_lane,
    words_of,
)
from pallas_kernels.hopper.tiles import WGMMA

MMA = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"""
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
_SIGMOID = """{
    .reg .f32 t;
    mul.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 $0, t;
}"""  # the constants are -log2(e) and 1


def advance(pointer: ir.Value, count: ir.Value) -> ir.Value:
    """Returns ``pointer`` advanced by ``count`` bytes."""
    return element(pointer, count, ir.IntegerType.get_signless(8))


def load_words(pointer: ir.Value) -> list[ir.Value]:
    """Loads four 32-bit words from a multiple of 16 bytes."""
    loaded = llvm.load(ir.VectorType.get((4,), i32()), pointer, alignment=16)
    return [llvm.extractelement(loaded, const(i)) for i in range(4)]


def warp_sum(number: ir.Value) -> ir.Value:
    """Returns the sum of an int32 of each lane of the warp."""
    return _of_warp(f"redux.sync.add.s32 $0, $1, {_ALL_LANES};", number)


def exchanged(number: ir.Value, distance: int) -> ir.Value:
    """Returns the float32 of the lane whose number differs in the bit ``distance``."""
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, {_ALL_LANES};"
    return asm(text, "=f,f", number, result=f32(), effects=True)


def last_lane(number: ir.Value) -> ir.Value:
    """Returns the number of the warp's last lane."""
    return _of_warp(f"shfl.sync.idx.b32 $0, $1, 31, 31, {_ALL_LANES};", number)


def prefix_sums(values: list[ir.Value]) -> list[ir.Value]:
    """Returns inclusive prefix sums over the lanes, of each value separately. The scans are
    interleaved, because one step has a long latency."""
    for distance in (1, 2, 4, 8, 16):
        values = [_of_warp(_SCAN_STEP.replace("DISTANCE", str(distance)), x) for x in values]
    return values


def _of_warp(text: str, number: ir.Value) -> ir.Value:
    return asm(text, "=r,r", number, result=i32(), effects=True)


def approximate_sigmoid(x: jax.Array, *, on_gpu: bool) -> jax.Array:
    """Returns ``1 / (1 + exp(-x))`` in four instructions, with a relative error of some 2^-21, for
    float32 [64, columns] in the WGMMA layout. The exact exponential and division take about twenty.
    Two of the four are those of special function units, which take eight cycles for a warp, as many
    as all others together."""
    if not on_gpu:
        return 1 / (1 + jnp.exp(-x))
    result = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=WGMMA)

    @inline(WGMMA, returns=result)
    def sigmoid(x):
        results = [
            [asm(_SIGMOID, "=f,f", item(pair, i), result=f32()) for i in range(2)]
            for pair in x.registers.flat
        ]
        return array([float_pair(*both) for both in results], x.shape, WGMMA)

    return sigmoid(x)


def widened(p: jax.Array, on_gpu: bool) -> jax.Array:
    """Returns bfloat16 [64, columns] as float32, from its packed registers. If the compiler knew
    where they come from, it would keep the float32 numbers in registers, which are too few."""
    if not on_gpu:
        return p.astype(jnp.float32)

    @inline(WGMMA, returns=plgpu.ShapeDtypeStruct(p.shape, jnp.float32, layout=WGMMA))
    def widen(p: Registers) -> Registers:
        pairs = []
        for word in words_of(p):
            text = "shl.b32 $0, $2, 16;\nand.b32 $1, $2, 0xffff0000;"
            numbers = asm_numbers(text, "=&r,=r,r", word, kind=i32(), count=2)
            pairs.append(float_pair(*(arith.bitcast(f32(), x) for x in numbers)))
        return array(pairs, p.shape, WGMMA)

    return widen(p)


def store_swizzled(part: jax.Array, base: jax.Array, first: int) -> None:
    """Stores bfloat16 [64, 16] as columns from ``first`` on of swizzled rows of 128 bytes in shared
    memory, at ``base`` units of 16 bytes (see ``wgmma.operand_base``). The instruction stores the
    four matrices [8, 8] that a warp has. Each lane passes the address of one row."""

    @inline(WGMMA, SCALAR).on(part, base)
    def _(part: Registers, base: Registers) -> None:
        warp, lane = warp_and_lane()
        row = arith.addi(arith.muli(warp, const(16)), arith.andi(lane, const(15)))
        unit = arith.xori(arith.shrui(lane, const(4)), arith.andi(lane, const(7)))
        unit = arith.addi(arith.muli(row, const(8)), unit)
        address = arith.shli(arith.addi(value_of(base), unit), const(4))
        text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
        instruction(text, arith.xori(address, const(2 * first)), *words_of(part))
