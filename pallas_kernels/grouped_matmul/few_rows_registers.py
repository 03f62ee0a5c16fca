"""What a thread of few_rows does to its own registers: read packed weights, unpack them in place
into an operand of a tensor core product, read their scales, write the result.

Of a product of 64 matrix rows, thread ``lane`` of a warp holds two rows, ``lane // 4`` and the one
8 further down, and 4 of 16 columns. Which matrix rows and columns these are is free as long as x
and the result agree: see few_rows.arranged for the columns and _lane_row for the rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mosaic_ir import REF, SCALAR, array, asm, const, i32, i64, inline, warp_and_lane


def _lane_row(parts: int):
    """(row of the first of a thread's two, lane % 4): of 64 rows.

    128-byte rows are swizzled by their number's low three bits. A quarter of a warp reads 64 bytes
    of two rows at once; that these be rows r and r + 4 puts them into different banks, hence bits 0
    and 2 change places. 64-byte rows lie one after the other.
    """
    warp, lane = warp_and_lane()
    q = arith.shrui(lane, const(2))
    if parts == 2:
        low, high = arith.andi(q, const(1)), arith.shrui(q, const(2))
        q = arith.ori(arith.andi(q, const(2)), arith.ori(arith.shli(low, const(2)), high))
    return arith.addi(arith.muli(warp, const(16)), q), arith.andi(lane, const(3))


def _offset(ptr: Any, count: Any, bytes_each: int):
    i8 = ir.IntegerType.get_signless(8)
    at = arith.muli(count, const(bytes_each)) if bytes_each != 1 else count
    return mgpu.utils.getelementptr(ptr, [at], i8)


def _int8(word: Any) -> list:
    """4 integers -> bytes (0, 2), (1, 3): 128 + the low 7 bits, less 128, or 256 if negative."""
    found = []
    for shift in (0, 8):
        text = """{
            .reg .b32 w, a, b;
            shr.u32 w, $1, SHIFT;
            lop3.b32 a, w, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 b, w, 0x00800080, 0x43004300, 0xEA;
            sub.rn.bf16x2 $0, a, b;
        }""".replace("SHIFT", str(shift))
        found.append(asm(text, "=r,r", word, result=i32()))
    return found


def _int4(word: Any) -> list:
    """8 integers -> (0, 4), (1, 5), (2, 6), (3, 7): 128 + the nibble with its top bit flipped."""
    found = []
    for shift in (0, 4, 8, 12):
        text = """{
            .reg .b32 w, a, b;
            shr.u32 w, $1, SHIFT;
            lop3.b32 a, w, 0x000F000F, 0x43084308, 0x6A;
            mov.b32 b, 0x43084308;
            sub.rn.bf16x2 $0, a, b;
        }""".replace("SHIFT", str(shift))
        found.append(asm(text, "=r,r", word, result=i32()))
    return found


def _float8(word: Any) -> list:
    """4 float8_e4m3fn -> bytes (0, 2), (1, 3): their bits are bfloat16s, only 2^-120 as large."""
    found = []
    for shift in (8, 0):
        text = """{
            .reg .b32 w, a, b, s;
            shl.b32 w, $1, SHIFT;
            shr.u32 a, w, 4;
            and.b32 a, a, 0x07F007F0;
            lop3.b32 b, w, 0x80008000, a, 0xEA;
            mov.b32 s, 0x7B807B80;
            mul.rn.bf16x2 $0, b, s;
        }""".replace("SHIFT", str(shift))
        found.append(asm(text, "=r,r", word, result=i32()))
    return found


_UNPACK = {"int8": _int8, "int4": _int4, "float8": _float8}


def _read(ref: Any, format: str, p: int, parts: int) -> list[list]:
    """A thread's bfloat16 pairs of bytes 64 p to 64 p + 64 of its two rows, by products 16 columns
    deep: upper row, lower row, and so again 8 columns on."""
    base = mgpu.utils.memref_ptr(ref)
    row, t = _lane_row(parts)
    chunk = t
    if parts == 2:
        chunk = arith.xori(arith.xori(t, arith.andi(row, const(7))), const(4 * p))
    at = arith.addi(arith.muli(row, const(64 * parts)), arith.muli(chunk, const(16)))
    four = ir.VectorType.get((4,), i32())
    rows = []
    for half in range(2):
        ptr = _offset(base, arith.addi(at, const(half * 8 * 64 * parts)), 1)
        loaded = llvm.load(four, ptr, alignment=16)
        words = [llvm.extractelement(loaded, const(i)) for i in range(4)]
        rows.append([r for word in words for r in _UNPACK[format](word)])
    upper, lower = rows
    return [[upper[i], lower[i], upper[i + 1], lower[i + 1]] for i in range(0, len(upper), 2)]


def unpack(words: Any, format: str, p: int, parts: int) -> tuple[jax.Array, ...]:
    """bfloat16 [64, 64] blocks, one of int8 and float8, two of int4, of bytes 64 p to 64 p + 64 of
    64 matrix rows in shared memory."""
    layout = plgpu.Layout.WGMMA
    blocks = 2 if format == "int4" else 1
    result = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=layout)

    @inline(plgpu.RefType(_swizzle(parts)), returns=(result,) * blocks)
    def read(ref):
        bf16x2 = ir.VectorType.get((2,), ir.BF16Type.get())
        flat = [llvm.bitcast(bf16x2, r) for of in _read(ref, format, p, parts) for r in of]
        return tuple(array(flat[b * 16 : (b + 1) * 16], (64, 64), layout) for b in range(blocks))

    return read(words)


def _swizzle(parts: int) -> tuple:
    return (plgpu.SwizzleTransform(128),) if parts == 2 else ()


_MMA = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"""
_LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"


def multiply(words: Any, x: Any, format: str, of: range, parts: int, c: int) -> jax.Array:
    """float32 [64, c]: parts ``of`` of 64 packed matrix rows times x, [blocks, c, 64] in shared
    memory, each warp its 16 rows."""
    layout = plgpu.Layout.WGMMA

    @inline(
        plgpu.RefType(_swizzle(parts)),
        plgpu.RefType(_swizzle(2)),
        returns=plgpu.ShapeDtypeStruct((64, c), jnp.float32, layout=layout),
    )
    def product(words, x):
        f32 = ir.F32Type.get()
        # Lane l points at 16 bytes of row l % 8: the l // 8th eight columns of 32.
        lane = arith.andi(mgpu.utils.thread_idx(), const(31))
        row, eight = arith.andi(lane, const(7)), arith.shrui(lane, const(3))
        address = llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(x))
        address = arith.addi(address, arith.muli(row, const(128)))
        chunk = arith.muli(arith.xori(row, eight), const(16))
        halves = [arith.addi(address, chunk), arith.addi(address, arith.xori(chunk, const(64)))]
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        sums: list[list[Any]] = [[zero] * 4 for _ in range(c // 8)]
        slices = [a for p in of for a in _read(words, format, p, parts)]
        first = of.start * (8 if format == "int4" else 4)
        four_words = llvm.StructType.get_literal([i32()] * 4)
        four_sums = llvm.StructType.get_literal([f32] * 4)
        for s in range(0, len(slices), 2):  # 32 columns
            block, half = divmod((first + s) // 2, 2)
            for n in range(c // 8):
                at = arith.addi(halves[half], const((block * c + 8 * n) * 128))
                loaded = asm(_LDMATRIX, "=r,=r,=r,=r,r", at, result=four_words, effects=True)
                b = [llvm.extractvalue(i32(), loaded, [i]) for i in range(4)]
                for d in range(2):
                    done = asm(
                        _MMA,
                        "=f,=f,=f,=f,0,1,2,3,r,r,r,r,r,r",
                        *sums[n],
                        *slices[s + d],
                        *b[2 * d : 2 * d + 2],
                        result=four_sums,
                    )
                    sums[n] = [llvm.extractvalue(f32, done, [i]) for i in range(4)]
        pair = ir.VectorType.get((2,), f32)
        flat = [vector.from_elements(pair, r[i : i + 2]) for r in sums for i in (0, 2)]
        return array(flat, (64, c), layout)

    return product(words, x)


def hold(*arrays: jax.Array) -> None:
    """Reads arrays, to no effect that ptxas could know of: stores that no thread makes, by fours
    as the product takes them."""

    @inline(*(plgpu.Layout.WGMMA for _ in arrays))
    def read(*arrays):
        words = [llvm.bitcast(i32(), r) for a in arrays for r in a.registers.flat]
        fours = range(0, len(words), 4)
        stores = [f"st.global.v4.b32 [a], {{${i}, ${i + 1}, ${i + 2}, ${i + 3}}};" for i in fours]
        text = [
            "{ .reg .b32 z; .reg .pred p; .reg .b64 a;",
            "mov.u32 z, %nctaid.z;",  # the grid is one block deep
            "setp.ne.u32 p, z, 77;",
            "@p bra.uni HELD;",
            "mov.b64 a, 0;",
            *stores,
            "HELD: }",
        ]
        asm("\n".join(text), ",".join(["r"] * len(words)), *words, effects=True)

    read(*arrays)


def row_scales(scales: Any, parts: int) -> jax.Array:
    """float32 [64] of one column of scales in global memory."""
    layout = plgpu.Layout.WGMMA.reduce(1)

    @inline(REF, returns=plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=layout))
    def read(ref):
        (stride,), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        base = mgpu.utils.memref_ptr(ref)
        row, _ = _lane_row(parts)
        f32 = ir.F32Type.get()
        found = []
        for half in range(2):
            at = _offset(base, arith.addi(row, const(8 * half)), 4 * stride)
            loaded = asm(
                "ld.global.nc.f32 $0, [$1];",
                "=f,l",
                llvm.ptrtoint(i64(), at),
                result=f32,
                effects=True,
            )
            found.append(vector.broadcast(ir.VectorType.get((1,), f32), loaded))
        return array(found, (64,), layout)

    return read(scales)


def store(out: Any, values: jax.Array, rows: jax.Array, parts: int) -> None:
    """Writes the first ``rows`` columns of [64, c] to rows of [c, 64] in global memory, bfloat16 or
    float32."""
    size = values.dtype.itemsize

    @inline(REF, plgpu.Layout.WGMMA, SCALAR)
    def write(ref, values, rows):
        (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        base = mgpu.utils.memref_ptr(ref)
        rows = rows.registers.item()
        row, t = _lane_row(parts)
        first = arith.muli(t, const(2))
        column = _offset(base, row, size)
        registers = values.registers.flat
        for n in range(values.shape[1] // 8):
            for e in range(2):
                m = arith.addi(first, const(8 * n + e))
                at = llvm.ptrtoint(i64(), _offset(column, m, size * stride))
                for half in range(2):
                    pair = registers[2 * n + half]
                    if size == 2:
                        value, kind = llvm.bitcast(i32(), pair), "r"
                        parted = "mov.b32 {low, high}, $1;"
                        text = f"st.global.b16 [$0 + {16 * half}], {'high' if e else 'low'};"
                    else:
                        value, kind = llvm.extractelement(pair, const(e)), "f"
                        parted, text = "", f"st.global.f32 [$0 + {32 * half}], $1;"
                    text = f"""{{
                        .reg .pred p; .reg .b16 low, high;
                        setp.lt.s32 p, $2, $3;
                        {parted}
                        @p {text}
                    }}"""
                    asm(text, f"l,{kind},r,r", at, value, m, rows, effects=True)

    write(out, values, rows)


def put(sums: Any, values: jax.Array, *, on_gpu: bool) -> None:
    """Lays float32 [64, c] into shared memory as threads hold them, for :func:`take`."""
    if not on_gpu:
        sums[pl.ds(0, values.size)] = values.reshape(-1)
        return

    @inline(REF, plgpu.Layout.WGMMA)
    def write(ref, values):
        for at, pair in zip(_own(ref, values.registers.size), values.registers.flat, strict=True):
            llvm.store(pair, at)

    write(sums, values)


def take(sums: Any, c: int, *, on_gpu: bool) -> jax.Array:
    """float32 [64, c] that another warpgroup's :func:`put` left."""
    if not on_gpu:
        return sums[pl.ds(0, 64 * c)].reshape(64, c)
    layout = plgpu.Layout.WGMMA

    @inline(REF, returns=plgpu.ShapeDtypeStruct((64, c), jnp.float32, layout=layout))
    def read(ref):
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        return array([llvm.load(pair, at) for at in _own(ref, c // 4)], (64, c), layout)

    return read(sums)


def _own(ref: Any, pairs: int) -> list[Any]:
    """Where a thread's pairs of float32 go: a warp's next to each other."""
    warp, lane = warp_and_lane()
    thread = arith.addi(arith.muli(warp, const(32)), lane)
    base = _offset(mgpu.utils.memref_ptr(ref), thread, 8)
    return [_offset(base, const(1024 * j), 1) for j in range(pairs)]


def plain(bytes_: jax.Array, format: str) -> jax.Array:
    """float32 [64, blocks, 64] as :func:`unpack` orders it, for the interpreter."""
    if format != "int4":
        values = bytes_.astype(jnp.float32).reshape(64, 4, 4, 2, 2)  # thread, word, pair, half
        return values.transpose(0, 2, 4, 1, 3).reshape(64, 1, 64)
    integers = bytes_.astype(jnp.int32)
    nibbles = jnp.stack([integers & 15, integers >> 4], axis=-1)
    values = ((nibbles ^ 8) - 8).astype(jnp.float32).reshape(64, 4, 2, 2, 2, 2, 2)
    return values.transpose(0, 2, 3, 5, 6, 1, 4).reshape(64, 2, 64)
