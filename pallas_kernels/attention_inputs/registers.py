"""Code for single threads: queries times pieces of W_UK, and rope of a block of results.

``sum_n q[n] W[n, c]`` for a piece's columns is computed on ordinary cores: W_UK's rows are the
sum's index, so the loads of tensor core operands would have to transpose it. A multiplication takes
one instruction per weight and token instead, and a CTA has few weights.

A warp has 64 columns of a piece and 16 rows of each stage. Of these, lane l has eight columns from
``8 (l % 8)`` on, and the rows ``l // 8 + 4 i``. At the end of a piece, the sums of a warp's lanes
with the same columns are added in registers, and those of the warps with the same columns in shared
memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from pallas_kernels.decoder_layer.activations import PER_THREAD, token_and_number
from pallas_kernels.decoder_layer.registers import ROWS
from pallas_kernels.decoder_layer.stream import CONSUMERS, STEP_BYTES, WARPGROUP
from pallas_kernels.hopper import Index, Ref
from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    Registers,
    array,
    asm,
    const,
    element,
    f32,
    global_address,
    i32,
    i64,
    inline,
    item,
    value_of,
)
from pallas_kernels.hopper.lanes import LANES, LAYOUT, filled, load, only, per_thread, thread_index
from pallas_kernels.hopper.registers import advance, exchanged
from pallas_kernels.hopper.warpgroup import when

_COLUMNS = 8  # of a lane
_ROWS = 4  # of a lane, in each stage
_WARP_ROWS = 16  # of a warp, in each stage
_GROUP = 64  # columns of a warp
_PIECE_WIDTHS = 512, 256, 128, 64


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of W_UK: all N rows of a head, and some of its C columns."""

    heads: int
    nope: int
    rank: int
    width: int  # columns of a piece
    tokens: int
    dtype: Any

    @staticmethod
    def of(heads: int, nope: int, rank: int, tokens: int, dtype: Any, ctas: int) -> Pieces:
        """Returns the pieces that give the CTA with the most columns as few as possible."""

        def most_columns(pieces: Pieces) -> int:
            return -(-heads * pieces.per_head // ctas) * pieces.width

        widths = [width for width in _PIECE_WIDTHS if rank % width == 0]
        pieces = [Pieces(heads, nope, rank, each, tokens, jnp.dtype(dtype)) for each in widths]
        return min((each for each in pieces if nope % each.rows == 0), key=most_columns)

    @property
    def per_head(self) -> int:
        return self.rank // self.width

    @property
    def query_stride(self) -> int:
        """Distance of the heads' queries. A warpgroup copies them to shared memory as whole
        vectors, together with what fills up the distance."""
        return -(-self.nope // WARPGROUP) * WARPGROUP

    @property
    def rows(self) -> int:
        """Rows per stage, which then has 16 KiB."""
        return 2 * ROWS * STEP_BYTES // (self.width * self.dtype.itemsize)

    @property
    def steps(self) -> int:
        """Stages per piece."""
        return self.nope // self.rows

    @property
    def groups(self) -> int:
        """Groups of 64 columns. Each is of other warps."""
        return self.width // _GROUP

    @property
    def partials(self) -> int:
        """Numbers in the memory of the sums: 64 per warp and token."""
        return 4 * CONSUMERS * _GROUP * self.tokens


def no_sums(pieces: Pieces, interpret: Any) -> jax.Array:
    """Returns zeros for a warpgroup's sums of a piece."""
    if interpret is not None:
        return jnp.zeros((pieces.tokens, pieces.width), jnp.float32)
    return plgpu.layout_cast(jnp.zeros(_shape(pieces), jnp.float32), layout_of(pieces))


def add_products(
    pieces: Pieces, stage: Ref, row_bytes: int, queries_s: Ref, step: jax.Array, sums: jax.Array,
    interpret: Any,
) -> jax.Array:  # fmt: skip
    """Adds the products of the rows of a piece's ``step``-th stage to the warpgroup's sums.
    ``stage`` is a reference to its bytes, with ``row_bytes`` an eighth of half a stage, or in the
    interpreter to its numbers [halves, rows, columns]; ``queries_s`` flat float32 [M, query_stride]
    in shared memory."""
    rows, half = pieces.rows, pieces.rows // 2
    if interpret is not None:
        wg = lax.axis_index("wg")
        first = step * rows + wg * half
        starts = [t * pieces.query_stride + first for t in range(pieces.tokens)]
        queries = jnp.stack([queries_s[pl.ds(start, half)] for start in starts])
        highest = lax.Precision.HIGHEST
        return sums + jnp.dot(queries, stage[wg].astype(jnp.float32), precision=highest)

    layout = layout_of(pieces)
    weight_bytes = pieces.dtype.itemsize
    # Distance from the end of the first half's rows to the second half.
    gap = 8 * row_bytes - half * pieces.width * weight_bytes

    result = plgpu.ShapeDtypeStruct(_shape(pieces), jnp.float32, layout=layout)

    @inline(REF, REF, SCALAR, layout, returns=result)
    def add(weights: ir.Value, queries: ir.Value, step: Registers, sums: Registers) -> Registers:
        warp, lane = _warp_and_lane()
        groups = const(pieces.groups)
        group, part = arith.remui(warp, groups), arith.divui(warp, groups)
        column = arith.addi(
            arith.muli(group, const(_GROUP)),
            arith.muli(arith.andi(lane, const(7)), const(_COLUMNS)),
        )
        row = arith.addi(arith.muli(part, const(_WARP_ROWS)), arith.shrui(lane, const(3)))
        first = arith.addi(arith.muli(row, const(pieces.width)), column)
        first = arith.muli(first, const(weight_bytes))
        memory = mgpu.utils.memref_ptr(weights)
        query = arith.addi(row, arith.muli(value_of(step), const(rows)))
        query = element(mgpu.utils.memref_ptr(queries), query, f32())
        totals = [[item(r, c) for c in range(_COLUMNS)] for r in sums.registers.flat]
        for i in range(_ROWS):
            is_second = arith.cmpi(
                arith.CmpIPredicate.uge, arith.addi(row, const(4 * i)), const(half)
            )
            offset = arith.select(is_second, const(gap), const(0))
            distance = 4 * i * pieces.width * weight_bytes
            offset = arith.addi(arith.addi(first, const(distance)), offset)
            numbers = _load_bfloat16(advance(memory, offset))
            for t, of_token in enumerate(totals):
                at = element(query, const(t * pieces.query_stride + 4 * i), f32())
                q = llvm.load(f32(), at)
                for c, number in enumerate(numbers):
                    of_token[c] = llvm.intr_fma(q, number, of_token[c])
        kind = ir.VectorType.get((_COLUMNS,), f32())
        return array([vector.from_elements(kind, each) for each in totals], _shape(pieces), layout)

    return add(stage, queries_s, jnp.asarray(step, jnp.int32), sums)


def store_sums(pieces: Pieces, partials_s: Ref, sums: jax.Array, interpret: Any) -> None:
    """Stores the sums of a warpgroup's warps for :func:`store_totals`, flat float32 in shared
    memory: [warps, M, 64], or in the interpreter [warpgroups, M, columns]."""
    if interpret is not None:
        size = pieces.tokens * pieces.width
        partials_s[pl.ds(lax.axis_index("wg") * size, size)] = sums.reshape(-1)
        return

    @inline(REF, layout_of(pieces)).on(partials_s, sums)
    def _(partials: ir.Value, sums: Registers) -> None:
        warp, lane = _warp_and_lane()
        totals = [[item(r, c) for c in range(_COLUMNS)] for r in sums.registers.flat]
        for distance in (8, 16):
            for of_token in totals:
                others = [exchanged(x, distance) for x in of_token]
                of_token[:] = [arith.addf(x, y) for x, y in zip(of_token, others, strict=True)]
        is_first = arith.cmpi(arith.CmpIPredicate.ult, lane, const(8))
        with ir.InsertionPoint(scf.IfOp(is_first).then_block):
            start = arith.muli(warp, const(pieces.tokens * _GROUP))
            start = arith.addi(start, arith.muli(lane, const(_COLUMNS)))
            pointer = element(mgpu.utils.memref_ptr(partials), start, f32())
            four = ir.VectorType.get((4,), f32())
            for t, of_token in enumerate(totals):
                for c in range(0, _COLUMNS, 4):
                    at = element(pointer, const(t * _GROUP + c), f32())
                    values = vector.from_elements(four, of_token[c : c + 4])
                    llvm.store(values, at, alignment=16)
            scf.yield_([])


def store_totals(
    pieces: Pieces, partials_s: Ref, out_g: Ref, start: jax.Array, interpret: Any
) -> None:
    """Stores a piece's results, rounded, in flat [M H C] in global memory, the first token's first
    column at ``start``. Both consumer warpgroups call it."""
    stride = pieces.heads * pieces.rank
    if interpret is not None:
        # Half of the columns each.
        size, half = pieces.tokens * pieces.width, pieces.width // CONSUMERS
        first = lax.axis_index("wg") * half
        for t in range(pieces.tokens):
            at = t * pieces.width + first
            total: Any = sum(partials_s[pl.ds(wg * size + at, half)] for wg in range(CONSUMERS))
            out_g[pl.ds(start + t * stride + first, half)] = total.astype(out_g.dtype)
        return

    @inline(REF, REF, SCALAR).on(partials_s, out_g, jnp.asarray(start, jnp.int32))
    def _(partials: ir.Value, out: ir.Value, start: Registers) -> None:
        address = global_address(out)
        pairs, of_token = pieces.tokens * pieces.width // 2, pieces.width // 2
        for first in range(0, pairs, CONSUMERS * WARPGROUP):
            pair = arith.addi(mgpu.utils.thread_idx(), const(first))
            exists = arith.cmpi(arith.CmpIPredicate.ult, pair, const(pairs))
            with ir.InsertionPoint(scf.IfOp(exists).then_block):
                token = arith.divui(pair, const(of_token))
                column = arith.muli(arith.remui(pair, const(of_token)), const(2))
                group = arith.divui(column, const(_GROUP))
                index = arith.addi(arith.muli(group, const(pieces.tokens)), token)
                index = arith.addi(
                    arith.muli(index, const(_GROUP)), arith.remui(column, const(_GROUP))
                )
                pointer = element(mgpu.utils.memref_ptr(partials), index, f32())
                two = ir.VectorType.get((2,), f32())
                total: Any = None
                for part in range(4 * CONSUMERS // pieces.groups):
                    distance = const(part * pieces.groups * pieces.tokens * _GROUP)
                    number = llvm.load(two, element(pointer, distance, f32()), alignment=8)
                    total = number if total is None else arith.addf(total, number)
                low, high = (llvm.extractelement(total, const(i)) for i in range(2))
                text = "cvt.rn.bf16x2.f32 $0, $2, $1;"
                packed = asm(text, "=r,f,f", low, high, result=i32())
                offset = arith.addi(arith.muli(token, const(stride)), column)
                offset = arith.muli(arith.addi(offset, value_of(start)), const(2))
                at = arith.addi(address, arith.extui(i64(), offset))
                asm("st.global.b32 [$0], $1;", "l,r,~{memory}", at, packed, effects=True)
                scf.yield_([])


def _shape(pieces: Pieces) -> tuple[int]:
    return (WARPGROUP * _COLUMNS * pieces.tokens,)


def layout_of(pieces: Pieces) -> Any:
    """Returns the layout of a warpgroup's sums: a register of eight columns for each token."""
    return plgpu.Layout.WG_STRIDED(_shape(pieces), vec_size=_COLUMNS)


def _warp_and_lane() -> tuple[ir.Value, ir.Value]:
    """Returns the thread's warp, of all consumers', and its lane."""
    thread = mgpu.utils.thread_idx()
    return mgpu.utils.warp_idx(), arith.andi(thread, const(31))


def _load_bfloat16(pointer: ir.Value) -> list[ir.Value]:
    """Loads eight bfloat16 from shared memory as float32."""
    loaded = llvm.load(ir.VectorType.get((4,), i32()), pointer, alignment=16)
    numbers = []
    for i in range(4):
        two = llvm.extractelement(loaded, const(i))
        halves = arith.shli(two, const(16)), arith.andi(two, const(-65536))
        numbers += [llvm.bitcast(f32(), half) for half in halves]
    return numbers


def store_rotated(
    ref: Ref, row_of: Callable[[Any], Any], first: int, pair: jax.Array, block: jax.Array,
    cos_g: Ref, sin_g: Ref, tokens: int, interpret: Any,
) -> None:  # fmt: skip
    """Rotates a block's pairs, from number ``pair`` on, and stores them in [rows, columns] in
    global memory: the first numbers of all pairs come first, at column ``first``. A whole warpgroup
    calls it. ``row_of`` is a function from tokens to their rows, negative for those that are not
    stored."""
    half = cos_g.shape[1]
    if interpret is not None:
        pairs = block.reshape(-1)[:64].reshape(8, 4, 2)
        for t in range(tokens):
            cos, sin = (each[t, pl.ds(pair, 4)] for each in (cos_g, sin_g))
            one, two = pairs[t, :, 0], pairs[t, :, 1]
            row = row_of(t)

            @when(row >= 0)
            def _(row: Index = row, one: Any = one, two: Any = two, cos: Any = cos, sin: Any = sin):
                ref[row, pl.ds(first + pair, 4)] = (one * cos - two * sin).astype(ref.dtype)
                ref[row, pl.ds(first + half + pair, 4)] = (two * cos + one * sin).astype(ref.dtype)

        return
    token, number = token_and_number()
    exists = (token < tokens) & (thread_index(0) < 2)
    token = jnp.minimum(token, tokens - 1)
    rotation = lax.shift_right_logical(number, filled(1)) + pair
    is_second = jnp.bitwise_and(number, 1)
    cos, sin = (load(each, token * half + rotation, LANES, None) for each in (cos_g, sin_g))
    other = inline(LAYOUT, returns=PER_THREAD)(lambda x: per_thread(exchanged(only(x), 1)))(block)
    rotated = block * cos + jnp.where(is_second == 1, other, -other) * sin
    row = jnp.where(exists, row_of(token), -1)
    _store(ref, row, rotation + first + is_second * half, rotated)


def _store(ref: Ref, row: jax.Array, column: jax.Array, values: jax.Array) -> None:
    """Sets ``ref[row, column]`` where the row is not negative. A cache may have 2^31 numbers."""
    itemsize, width = jnp.dtype(ref.dtype).itemsize, ref.shape[1]

    @inline(REF, LAYOUT, LAYOUT, LAYOUT).on(ref, row, column, values)
    def _(ref: ir.Value, row: Registers, column: Registers, values: Registers) -> None:
        text = """{
            .reg .pred there; .reg .b16 low;
            setp.ge.s32 there, $1, 0;
            cvt.rn.bf16.f32 low, $2;
            @there st.global.b16 [$0], low;
        }"""
        address = global_address(ref)
        for index, size in ((row, width * itemsize), (column, itemsize)):
            step = const(size, 64)
            address = arith.addi(address, arith.muli(arith.extsi(i64(), only(index)), step))
        asm(text, "l,r,f,~{memory}", address, only(row), only(values), effects=True)
