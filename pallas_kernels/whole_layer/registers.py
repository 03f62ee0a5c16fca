"""Code for single threads: attention of 16 query rows to a page of 64 tokens, by mma.sync.

Eight warps share a page. For the scores, a warp has eight of its tokens and all columns; for the
values it has all tokens and 64 columns. Operands of the scores may have the columns of K in any
order, if it is the same in both. So a thread reads 16 contiguous bytes of a key, and the same
columns of two queries. The values' operands are pairs of tokens: two tokens' words, a pair of
columns each, are permuted to a pair of tokens for each column.

Thread g * 4 + q of a warp has the rows g and g + 8 of every result. In its registers are

    keys        18 times 8 columns of token g of the warp's eight
    scores      of its two rows for the warp's tokens 2 q and 2 q + 1, in base 2
    running     the largest score so far of both rows, and the sums of its own probabilities
    values      8 columns, from 8 g on of the warp's 64, of 8 tokens of half of the page
    acc         of its two rows, for the columns 8 n + c of the warp's, n = 2 q and 2 q + 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from pallas_kernels.hopper.ir import REF, SCALAR, array, asm, const, i32, i64, inline, item
from pallas_kernels.hopper.ir import word as register

LATENT, ROPE, PAGE = 512, 64, 64
"""Columns of a token, and tokens of a page."""
QUERY_ROWS = 16
"""Rows of the queries that a program attends with."""
QUERY_STRIDE = LATENT + ROPE + 32
"""Distance of the queries in shared memory: the rows that eight threads read at once are then in
different banks."""
PROBABILITY_STRIDE = PAGE + 32
WARPS = 8

_WIDTH = LATENT + ROPE
_KEY_LOADS = _WIDTH // 32
_VALUE_LOADS = 8
_MMA = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"""
_MASKED = float("-inf")


def _array_of(registers: int, dtype: Any) -> Any:
    """Returns the type of a warpgroup's array: each thread has N registers of four numbers."""
    shape = (128 * 4 * registers,)
    return plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WG_STRIDED(shape, vec_size=4))


KEYS = _array_of(_KEY_LOADS, jnp.int32)
SCORES = _array_of(1, jnp.float32)
RUNNING = _array_of(1, jnp.float32)
VALUES = _array_of(_VALUE_LOADS, jnp.int32)
ACC = _array_of(8, jnp.float32)


def zeros(kind: Any, *first: float) -> jax.Array:
    """Returns an array of zeros, whose registers begin with other numbers if given."""

    @inline(returns=kind)
    def make() -> Any:
        is_float = kind.dtype == jnp.float32
        numbers: list[Any] = [
            _float(float(x)) if is_float else const(int(x)) for x in (*first, 0, 0, 0, 0)
        ]
        count = kind.shape[0] // 512
        return _pack([numbers[:4]] + [[numbers[-1]] * 4] * (count - 1), kind)

    return make()


def prefetch(pages: Any, page: jax.Array | int) -> None:
    """Brings a page into the L2 cache. One warp calls it."""

    @inline(REF, SCALAR)
    def start(pages: Any, page: Any) -> None:
        address = llvm.ptrtoint(i64(), _row_pointer(pages, register(page), const(0)))
        leader = mgpu.single_thread_predicate(mgpu.ThreadSubset.WARP)
        text = f"@$1 cp.async.bulk.prefetch.L2.global [$0], {2 * _WIDTH * PAGE};"
        asm(text, "l,b,~{memory}", address, leader, effects=True)

    start(pages, jnp.asarray(page, jnp.int32))


def load_keys(
    keys: jax.Array, pages: Any, page: jax.Array | int, low: jax.Array | int, high: jax.Array | int
) -> jax.Array:
    """Loads the keys of a page's tokens from ``low`` to ``high``. The others remain as they are.

    Args:
      pages: reference to bfloat16 [rows, 576] in global memory, 64 rows a page.
    """

    @inline(KEYS.layout, REF, SCALAR, SCALAR, SCALAR, returns=KEYS)
    def load(keys: Any, pages: Any, page: Any, low: Any, high: Any) -> Any:
        row, quarter, warp = _position()
        token = arith.addi(arith.muli(warp, const(8)), row)
        is_own = arith.andi(
            arith.cmpi(arith.CmpIPredicate.sge, token, register(low)),
            arith.cmpi(arith.CmpIPredicate.slt, token, register(high)),
        )
        before = [item(each, i) for each in keys.registers.flat for i in range(4)]
        branch: Any = scf.IfOp(is_own, [i32()] * len(before), has_else=True)
        with ir.InsertionPoint(branch.then_block):
            start = _row_pointer(pages, register(page), token)
            start = _advance(start, arith.muli(quarter, const(16)))
            scf.yield_([x for n in range(_KEY_LOADS) for x in _load_words(start, 64 * n)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(before)
        words = list(branch.results)
        return _pack([words[n : n + 4] for n in range(0, len(words), 4)], KEYS)

    return load(keys, pages, *(jnp.asarray(n, jnp.int32) for n in (page, low, high)))


def load_values(pages: Any, page: jax.Array | int, last: jax.Array | int, half: int) -> jax.Array:
    """Loads the values of half of a page. Tokens after the last one repeat it."""

    @inline(REF, SCALAR, SCALAR, returns=VALUES)
    def load(pages: Any, page: Any, last: Any) -> Any:
        row, quarter, warp = _position()
        column = arith.addi(arith.muli(warp, const(128)), arith.muli(row, const(16)))
        loaded = []
        for n in range(_VALUE_LOADS):
            token = arith.addi(arith.muli(quarter, const(8)), const(32 * half + n))
            token = arith.minui(token, register(last))
            pointer = _advance(_row_pointer(pages, register(page), token), column)
            loaded.append(_load_words(pointer, 0))
        return _pack(loaded, VALUES)

    return load(pages, *(jnp.asarray(n, jnp.int32) for n in (page, last)))


def copy_queries(q_latent: Any, q_rope: Any, first: jax.Array | int, queries_s: Any) -> None:
    """Copies 16 query rows to shared memory. Both consumer warpgroups call it.

    Args:
      q_latent: flat bfloat16 in global memory.
      q_rope: the same, or [rows, 64].
      first: the first row.
    """

    @inline(REF, REF, SCALAR, REF)
    def copy(q_latent: Any, q_rope: Any, first: Any, queries: Any) -> None:
        thread, target = mgpu.utils.thread_idx(), mgpu.utils.memref_ptr(queries)
        pieces = []
        for n in range(5):
            is_rope = n == 4  # 128 pieces of 16 bytes: each is copied twice
            columns, source = (ROPE, q_rope) if is_rope else (LATENT, q_latent)
            piece = arith.addi(thread, const(256 * (n % 4)))
            piece = arith.andi(piece, const(QUERY_ROWS * columns // 8 - 1))
            row, part = (f(piece, const(columns // 8)) for f in (arith.divui, arith.remui))
            start = arith.muli(register(first), const(2 * columns))
            start = arith.addi(start, arith.muli(piece, const(16)))
            to = arith.addi(arith.muli(row, const(2 * QUERY_STRIDE)), arith.muli(part, const(16)))
            to = arith.addi(to, const(2 * LATENT * is_rope))
            words = _load_words(_advance(mgpu.utils.memref_ptr(source), start), 0)
            pieces.append((words, to))
        for words, to in pieces:
            llvm.store(_four(words, i32()), _advance(target, to), alignment=16)

    copy(q_latent, q_rope, jnp.asarray(first, jnp.int32), queries_s)


def scores(
    keys: jax.Array, queries_s: Any, scale: float, visible: jax.Array | int, maxima_s: Any
) -> jax.Array:
    """Returns the scores times ``scale``, and stores each warp's largest ones for its rows.

    Args:
      visible: number of the page's tokens that the rows see, or more than 64.
      maxima_s: reference to float32 [8 warps, 16 rows], flat, in shared memory.
    """

    @inline(KEYS.layout, REF, SCALAR, REF, returns=SCORES)
    def compute(keys: Any, queries: Any, visible: Any, maxima: Any) -> Any:
        row, quarter, warp = _position()
        start = arith.addi(arith.muli(row, const(2 * QUERY_STRIDE)), arith.muli(quarter, const(16)))
        start = _advance(mgpu.utils.memref_ptr(queries), start)
        # Two chains of dependent instructions: with four, registers would not suffice.
        sums = [[_float(0.0)] * 4 for _ in range(2)]
        for n, each in enumerate(keys.registers.flat):
            upper = _load_words(start, 64 * n)
            lower = _load_words(start, 64 * n + 8 * 2 * QUERY_STRIDE)
            for i in range(2):
                chain = i
                a = upper[2 * i], lower[2 * i], upper[2 * i + 1], lower[2 * i + 1]
                sums[chain] = _mma(sums[chain], a, [item(each, 2 * i), item(each, 2 * i + 1)])
        total = [arith.addf(*x) for x in zip(*sums, strict=True)]
        token = arith.addi(arith.muli(warp, const(8)), arith.muli(quarter, const(2)))
        numbers = []
        for n, number in enumerate(total):
            sees = arith.cmpi(
                arith.CmpIPredicate.slt, arith.addi(token, const(n % 2)), register(visible)
            )
            number = arith.mulf(number, _float(scale))
            numbers.append(arith.select(sees, number, _float(_MASKED)))
        for half in range(2):
            largest = _over_quarters(arith.maximumf, arith.maximumf(*numbers[2 * half :][:2]))
            at = arith.addi(arith.muli(warp, const(QUERY_ROWS)), arith.addi(row, const(8 * half)))
            llvm.store(largest, _element(maxima, at))
        return _pack([numbers], SCORES)

    return compute(keys, queries_s, jnp.asarray(visible, jnp.int32), maxima_s)


def probabilities(
    scores: jax.Array, running: jax.Array, maxima_s: Any, probabilities_s: Any
) -> tuple[jax.Array, jax.Array]:
    """Stores the probabilities, relative to the largest score so far.

    Args:
      maxima_s: of all warps, from :func:`scores`.
      probabilities_s: reference to bfloat16 [16, 96], flat, in shared memory.

    Returns:
      The running numbers, and the factors of both rows' earlier results.
    """

    @inline(SCORES.layout, RUNNING.layout, REF, REF, returns=(RUNNING, RUNNING))
    def compute(scores: Any, running: Any, maxima: Any, probabilities: Any) -> Any:
        row, quarter, warp = _position()
        (own,), (before,) = scores.registers.flat, running.registers.flat
        largest, sums, factors = [], [], []
        token = arith.addi(arith.muli(warp, const(8)), arith.muli(quarter, const(2)))
        for half in range(2):
            rows = arith.addi(row, const(8 * half))
            maximum = item(before, half)
            for other in range(WARPS):
                at = _element(maxima, arith.addi(rows, const(other * QUERY_ROWS)))
                maximum = arith.maximumf(maximum, llvm.load(ir.F32Type.get(), at))
            pair = [_exp2(arith.subf(item(own, 2 * half + e), maximum)) for e in range(2)]
            factor = _exp2(arith.subf(item(before, half), maximum))
            total = arith.mulf(item(before, 2 + half), factor)
            sums.append(arith.addf(total, arith.addf(*pair)))
            at = arith.addi(arith.muli(rows, const(PROBABILITY_STRIDE)), token)
            pointer = _advance(mgpu.utils.memref_ptr(probabilities), arith.muli(at, const(2)))
            words = asm("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", *pair, result=i32())
            llvm.store(words, pointer)
            largest.append(maximum)
            factors.append(factor)
        return _pack([largest + sums], RUNNING), _pack([factors * 2], RUNNING)

    return compute(scores, running, maxima_s, probabilities_s)


def add_values(
    acc: jax.Array, factors: jax.Array, values: jax.Array, probabilities_s: Any, half: int
) -> jax.Array:
    """Adds the probabilities of half of a page times its values to the results.

    Before the first half, the results are multiplied by ``factors``.
    """

    @inline(ACC.layout, RUNNING.layout, VALUES.layout, REF, returns=ACC)
    def add(acc: Any, factors: Any, values: Any, probabilities: Any) -> Any:
        row, quarter, _ = _position()
        (both,) = factors.registers.flat
        sums = [[item(each, i) for i in range(4)] for each in acc.registers.flat]
        if half == 0:
            sums = [[arith.mulf(x, item(both, i // 2)) for i, x in enumerate(s)] for s in sums]
        start = arith.muli(row, const(2 * PROBABILITY_STRIDE))
        start = arith.addi(start, arith.muli(quarter, const(16)))
        start = _advance(mgpu.utils.memref_ptr(probabilities), start)
        loaded = list(values.registers.flat)
        upper = _load_words(start, 64 * half)
        lower = _load_words(start, 64 * half + 8 * 2 * PROBABILITY_STRIDE)
        for i in range(2):
            a = upper[2 * i], lower[2 * i], upper[2 * i + 1], lower[2 * i + 1]
            four = loaded[4 * i :][:4]
            for column in range(8):
                words = [item(each, column // 2) for each in four]
                b = [_of_column(words[n], words[n + 1], column % 2) for n in (0, 2)]
                sums[column] = _mma(sums[column], a, b)
        return _pack(sums, ACC)

    return add(acc, factors, values, probabilities_s)


def store_sums(running: jax.Array, sums_s: Any) -> None:
    """Stores each warp's sums of probabilities, as :func:`scores` does its largest scores."""

    @inline(RUNNING.layout, REF)
    def store(running: Any, sums: Any) -> None:
        row, _, warp = _position()
        (own,) = running.registers.flat
        for half in range(2):
            total = _over_quarters(arith.addf, item(own, 2 + half))
            at = arith.addi(arith.muli(warp, const(QUERY_ROWS)), arith.addi(row, const(8 * half)))
            llvm.store(total, _element(sums, at))

    store(running, sums_s)


def store_results(
    acc: jax.Array, running: jax.Array, sums_s: Any, partials: Any, lse: Any, first: jax.Array | int
) -> None:
    """Stores a part's results and its log-sum-exps.

    Args:
      sums_s: from :func:`store_sums` of all warps.
      partials: reference to flat float32 rows of 512 columns in global memory.
      lse: reference to flat float32, a number for each of these rows.
      first: the first of the 16 rows.
    """

    @inline(ACC.layout, RUNNING.layout, REF, REF, REF, SCALAR)
    def store(acc: Any, running: Any, sums: Any, partials: Any, lse: Any, first: Any) -> None:
        row, quarter, warp = _position()
        (own,) = running.registers.flat
        column = arith.addi(arith.muli(warp, const(64)), arith.muli(quarter, const(16)))
        tiles = list(acc.registers.flat)
        for half in range(2):
            rows, total = arith.addi(row, const(8 * half)), _float(0.0)
            for other in range(WARPS):
                at = _element(sums, arith.addi(rows, const(other * QUERY_ROWS)))
                total = arith.addf(total, llvm.load(ir.F32Type.get(), at))
            # A row that sees nothing has sums of zero.
            inverse = arith.divf(_float(1.0), arith.maximumf(total, _float(1e-37)))
            rows = arith.addi(rows, register(first))
            logarithm = asm("lg2.approx.f32 $0, $1;", "=f,f", total, result=ir.F32Type.get())
            logarithm = arith.mulf(
                arith.addf(item(own, half), logarithm), _float(0.6931471805599453)
            )
            llvm.store(logarithm, _element(lse, rows))
            at = arith.addi(arith.muli(rows, const(LATENT)), column)
            pointer = _element(partials, at)
            for n in range(0, 16, 4):
                numbers = [
                    arith.mulf(item(tiles[(n + i) % 8], 2 * half + n // 8), inverse)
                    for i in range(4)
                ]
                four = _four(numbers, ir.F32Type.get())
                llvm.store(four, _advance(pointer, const(4 * n)), alignment=16)

    store(acc, running, sums_s, partials, lse, jnp.asarray(first, jnp.int32))


def _position() -> tuple[Any, Any, Any]:
    """Returns the thread's row g and quarter q of its warp, and the warp, of all consumers'."""
    thread = mgpu.utils.thread_idx()
    row = arith.andi(arith.shrui(thread, const(2)), const(7))
    return row, arith.andi(thread, const(3)), mgpu.utils.warp_idx()


def _row_pointer(pages: Any, page: Any, token: Any) -> Any:
    """Returns the pointer to a token's row. A cache may have more than 2^31 bytes."""
    row = arith.addi(arith.muli(page, const(PAGE)), token)
    bytes_ = arith.constant(i64(), ir.IntegerAttr.get(i64(), 2 * _WIDTH))
    return _advance(mgpu.utils.memref_ptr(pages), arith.muli(arith.extui(i64(), row), bytes_))


def _advance(pointer: Any, count: Any) -> Any:
    """Returns ``pointer`` advanced by ``count`` bytes."""
    return mgpu.utils.getelementptr(pointer, [count], ir.IntegerType.get_signless(8))


def _element(memory: Any, index: Any) -> Any:
    """Returns the pointer to a float32."""
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [index], ir.F32Type.get())


def _load_words(pointer: Any, offset: int) -> list[Any]:
    """Returns the four words at a number of bytes from ``pointer``, a multiple of 16."""
    four = ir.VectorType.get((4,), i32())
    loaded = llvm.load(four, _advance(pointer, const(offset)), alignment=16)
    return [llvm.extractelement(loaded, const(i)) for i in range(4)]


def _four(numbers: Sequence[Any], kind: Any) -> Any:
    return vector.from_elements(ir.VectorType.get((4,), kind), list(numbers))


def _pack(registers: Sequence[Sequence[Any]], kind: Any) -> Any:
    """Returns an array of a type from the four numbers of each register."""
    is_float = kind.dtype == jnp.float32
    element = ir.F32Type.get() if is_float else i32()
    made = [_four(numbers, element) for numbers in registers]
    return array(made, kind.shape, kind.layout, None if is_float else True)


def _float(number: float) -> Any:
    f32 = ir.F32Type.get()
    return arith.constant(f32, ir.FloatAttr.get(f32, number))


def _mma(sums: Sequence[Any], a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    f32 = ir.F32Type.get()
    four = llvm.StructType.get_literal([f32] * 4)
    kinds = "=f,=f,=f,=f,0,1,2,3,r,r,r,r,r,r"
    result = asm(_MMA, kinds, *sums, *a, *b, result=four)
    return [llvm.extractvalue(f32, result, [n]) for n in range(4)]


def _of_column(first: Any, second: Any, number: int) -> Any:
    """Returns two tokens' numbers of one of the two columns of a word."""
    selector = ("0x5410", "0x7632")[number]
    return asm(f"prmt.b32 $0, $1, $2, {selector};", "=r,r,r", first, second, result=i32())


def _exp2(x: Any) -> Any:
    return asm("ex2.approx.ftz.f32 $0, $1;", "=f,f", x, result=ir.F32Type.get())


def _over_quarters(combine: Any, number: Any) -> Any:
    """Combines the numbers of the four threads with a row."""
    for distance in (1, 2):
        text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
        other = asm(text, "=f,f", number, result=ir.F32Type.get(), effects=True)
        number = combine(number, other)
    return number
