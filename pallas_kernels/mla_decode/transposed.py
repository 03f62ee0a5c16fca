"""Shared parts of the kernels for few query rows: softmax, P V, results, per-thread code.

Their matmuls are transposed, S^T = K Q^T and O^T += V^T P^T, so that the M dimension of wgmma (64)
is tokens or latent columns and its N dimension is query rows: no query rows are padded. Scores are
S^T [64, N], tokens by query rows, and P is stored as [N, 64]. O^T [512, N] takes 4 N registers per
thread, so one warpgroup holds all of it.

In a WGMMA tile of 64 x 8, each warp has 16 rows. Its thread ``lane`` holds rows ``lane // 4`` and
``lane // 4 + 8`` of them, and columns ``2 * (lane % 4)`` and the next one. With ``gpu=False``, in
the interpreter, each function operates on whole arrays instead.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.hopper import Index, Ref
from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    Registers,
    array,
    asm,
    asm_numbers,
    const,
    f32,
    float_const,
    float_pair,
    global_address,
    i32,
    i64,
    inline,
    item,
    numbers_of,
    shared_address,
    warp_and_lane,
    words_of,
)
from pallas_kernels.hopper.online_softmax import (
    LOG2E,
    SLACK,
    log_sum_exp,
    raised_maximum,
    reciprocal,
)
from pallas_kernels.hopper.split_kv import BLOCK, Partition
from pallas_kernels.hopper.tiles import ACC, COLUMN, TILES, WGMMA, spread_columns
from pallas_kernels.hopper.warpgroup import (
    WARPS,
    any_thread,
    fence_async_proxy,
    sync_warpgroup,
    warp_is,
    when,
)
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE

TILE_BYTES = 8 * 128
_REDUCTIONS: dict[str, Any] = {"max": arith.maximumf, "add": arith.addf}

State = tuple[jax.Array, jax.Array, jax.Array]
"""O^T [512, N], running maximum [N] in base 2, and sums of exponentials [N], of one consumer."""


@dataclasses.dataclass(frozen=True, eq=False)
class QueryBuffer:
    """A buffer for one sequence's queries, which a producer fills and all consumers read."""

    sources: tuple[Any, Any]
    """Latent queries [B, N, 512] and rope queries [B, N, 64] in global memory."""
    targets: tuple[Any, Any]
    """Latent queries [1, N, 512] and rope queries [1, N, 64] in shared memory."""
    full: Barriers
    """One barrier. Its use i is complete when the partition's i-th sequence has been copied."""
    free: Barriers
    """One barrier. Its use i is complete when all consumers have read the i-th sequence."""
    first_row: Callable[[], Any] = lambda: 0  # returns the first of the query rows in the buffer

    def initialise(self, consumers: int) -> None:
        self.full.initialise([2])
        self.free.initialise([consumers * WARPS])

    def fetch(self, i: Index, b: Index) -> None:
        """Copies the partition's i-th sequence, which is sequence b, when the buffer is free. One
        warp calls it."""
        when(i > 0)(lambda: self.free.wait(0, i - 1))
        for source, target, columns in zip(self.sources, self.targets, (LATENT, ROPE), strict=True):
            window = b, pl.ds(self.first_row(), target.shape[1]), pl.ds(0, columns)
            self.full.copy(0, source, window, target.at[0], None)

    def wait_for_arrivals(self, sequences: Index) -> None:
        """Waits until the last sequence has been read; the CTA may exit only then."""
        when(sequences > 0)(lambda: self.free.wait(0, sequences - 1))


@dataclasses.dataclass(frozen=True, eq=False)
class Producer:
    """A warpgroup that runs ahead: a warp copies a partition's key blocks, another one queries."""

    queries: QueryBuffer
    partition: Partition
    interpret: Any
    copy_block: Callable[[Any, Any, Any, Any], None]
    """Copies block ``done + j`` of the partition: ((done, j), blocks of the segment, page, next
    page). The segment is of one sequence, and ``done`` counts the partition's blocks before it."""
    wait_for_arrivals: Callable[[Any], None]
    """Waits for all releases of this number of blocks; the CTA may exit only then."""

    def run(self) -> None:
        sequence_count, zero = self.partition.sequence_count(), jnp.int32(0)
        if self.interpret is not None:  # in the interpreter a warpgroup is one thread

            def copy_sequence(i, done):
                self.copy_queries(i)
                return self.copy_blocks(i, done)

            self.wait_for_arrivals(lax.fori_loop(0, sequence_count, copy_sequence, zero))
            self.queries.wait_for_arrivals(sequence_count)
            return

        @when(warp_is(0))
        def _():
            self.wait_for_arrivals(lax.fori_loop(0, sequence_count, self.copy_blocks, zero))

        @when(warp_is(1))
        def _():
            lax.fori_loop(0, sequence_count, lambda i, _: self.copy_queries(i), None)
            self.queries.wait_for_arrivals(sequence_count)

    def copy_blocks(self, i: Index, done: Index) -> Any:
        """Copies the key blocks of the i-th segment; ``done`` counts the blocks before it."""
        partition = self.partition
        entry = partition.entry()
        page = partition.page(entry[0] + i, jnp.where(i == 0, entry[2], 0))
        b, begin, count = partition.segment(i, entry)

        def copy(j, page):
            next_page = partition.page(b, begin + j + 1)
            self.copy_block((done, j), count, page, next_page)
            return next_page

        lax.fori_loop(0, count, copy, page)
        return done + count

    def copy_queries(self, i: Index) -> None:
        self.queries.fetch(i, self.partition.first_sequence() + i)


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The softmax of a CTA's query rows. Row m of a sequence is query m // heads."""

    N: int  # query rows of the CTA
    queries: int
    heads: int
    scale: float
    max_pages: int  # width of the block table
    interpret: Any
    first_row: Callable[[], Any] | None = None
    """Returns the CTA's first query row, which is 0 by default."""
    padded: bool = False
    """Whether query rows may come after the last query's. They must see no token past the end."""

    def masked(self, s: jax.Array, length: Index, block: Index) -> jax.Array:
        """Returns the exponents of a key block's scores: -inf where a row may not attend."""
        s = s * (self.scale * LOG2E)
        token = plgpu.broadcasted_iota(jnp.int32, (BLOCK, self.N), 0, layout=WGMMA)
        visible = length - (self.queries - 1) - block * BLOCK
        if self.queries > 1:
            row = plgpu.broadcasted_iota(jnp.int32, (BLOCK, self.N), 1, layout=WGMMA)
            row = row + self.first_row() if self.first_row else row
            visible = visible + lax.div(row, jnp.int32(self.heads))
        end = self.max_pages * BLOCK
        end = (jnp.minimum(length, end) if self.padded else end) - block * BLOCK
        return jnp.where(token < jnp.minimum(visible, end), s, -jnp.inf)

    def store_p(self, target: Ref, s: jax.Array, maximum: jax.Array) -> jax.Array:
        """Returns P and writes it to ``target``; wgmma may read it after a barrier."""
        p = jnp.exp2(s - spread_columns(maximum, BLOCK))
        gpu = self.interpret is None
        put_transposed(target, p.astype(jnp.bfloat16), gpu=gpu)
        fence_async_proxy(self.interpret)
        return p

    def exceeds_slack(self, p: jax.Array) -> jax.Array:
        """Returns whether the running maximum must be raised. It is a barrier of the warpgroup."""
        if self.interpret is not None:
            return jnp.any(p > 2.0**SLACK)

        @inline(WGMMA, returns=plgpu.ShapeDtypeStruct((), jnp.bool_, layout=SCALAR))
        def vote(p: Registers):
            limit = float_const(2.0**SLACK)
            compared = [arith.cmpf(arith.CmpFPredicate.OGT, x, limit) for x in numbers_of(p)]
            above: Any = functools.reduce(arith.ori, compared)
            return mgpu.FragmentedArray.splat(any_thread(above), (), is_signed=False)

        return vote(p)

    def thread_sums(self, p: jax.Array) -> jax.Array:
        """Returns the sums of a thread's exponentials."""
        return reduce_rows(p, "add", gpu=self.interpret is None)

    def raise_maximum(
        self, target: Ref, s: jax.Array, maximum: jax.Array, scratch: Ref
    ) -> tuple[jax.Array, jax.Array]:
        """Writes P relative to a raised maximum. Returns the maximum and :meth:`thread_sums`."""
        gpu = self.interpret is None
        highest = reduce_rows(s, "max", gpu=gpu)
        highest = reduce_threads(highest, "max", scratch, gpu=gpu)
        raised = raised_maximum(highest, maximum)
        p = self.store_p(target, s, raised)
        sync_warpgroup(self.interpret)
        return raised, self.thread_sums(p)


@dataclasses.dataclass(frozen=True, eq=False)
class Values:
    """Some latent columns of a key block in shared memory."""

    first: int  # first latent column
    tokens: Ref  # bfloat16 [64, columns], or None if there are no latents
    release: Callable[[], None] | None = None
    """Releases the columns. It is called when they have been read."""


def add_values(acc: jax.Array, p: Ref, values: Sequence[Values], *, gpu: bool) -> jax.Array:
    """Returns O^T + V^T P^T, for ``acc`` O^T [512, N] and ``p`` P [N, 64] in shared memory."""

    def multiply(acc_ref):
        for each in values:
            if each.tokens is not None:
                rows = pl.ds(each.first, each.tokens.shape[1])
                plgpu.wgmma(acc_ref.at[rows], each.tokens.T, p.T)
        if not gpu:
            return acc_ref[...]
        pending = sum(each.tokens is not None for each in values)
        for each in values:
            pending -= each.tokens is not None
            if each.release is not None:
                if each.tokens is not None:
                    plgpu.wgmma_wait(pending)
                each.release()
        return None

    if gpu:
        return pl.run_state(multiply)(ACC.init(acc))
    # The interpreter cannot carry an accumulator through run_state.
    acc = acc + pl.run_scoped(multiply, ACC((LATENT, acc.shape[1]), jnp.float32))
    plgpu.commit_smem()
    for each in values:
        if each.release is not None:
            each.release()
    return acc


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """The kernel's outputs in global memory, see :func:`split_kv.output_types`."""

    out: Ref
    lse: Ref
    partial_out: Ref
    partial_lse: Ref
    rows: Callable[[], Any] | None = None
    """Returns the CTA's query rows, a ``pl.ds``. None if it has all."""
    swapped: bool = False  # whether O^T is in the order of store_transposed with ``swapped``

    def store(self, partition: Partition, b: Index, state: State, *, gpu: bool) -> None:
        """Stores a sequence's normalised output, or its partial output if it is split."""
        acc, maximum, total = state
        out = acc * spread_columns(reciprocal(total), LATENT)
        lse = log_sum_exp(maximum, total)
        is_split = partition.segments(b) > 1

        @when(jnp.logical_not(is_split))
        def _():
            rounded = out.astype(jnp.bfloat16)
            target = self._rows_of(self.out.at[b]), self._rows_of(self.lse.at[b])
            store_transposed(*target, rounded, lse, gpu=gpu, swapped=self.swapped)

        @when(is_split)
        def _():
            partial = partition.partial(b)
            target = (
                self._rows_of(self.partial_out.at[partial]),
                self._rows_of(self.partial_lse.at[partial]),
            )
            store_transposed(*target, out, lse, gpu=gpu, swapped=self.swapped)

    def _rows_of(self, result: Any) -> Any:
        return result if self.rows is None else result.at[self.rows()]


# ---- per-thread code ----------------------------------------------------------------------------


def column_vector(N: int, value: float) -> jax.Array:
    """Returns a vector [N] of ``value`` in the COLUMN layout."""
    return plgpu.layout_cast(jnp.full((N,), value, jnp.float32), COLUMN)


def put_transposed(target: Ref, p: jax.Array, *, gpu: bool) -> None:
    """Stores bfloat16 ``p`` [64, N], transposed to [N, 64], in shared memory as wgmma requires."""
    if not gpu:
        target[...] = p.T
        return

    @inline(TILES, WGMMA).on(target, p)
    def _(target: ir.Value, p: Registers):
        warp, lane = warp_and_lane()
        row, matrix = arith.andi(lane, const(7)), arith.shrui(lane, const(3))
        # 8 x 8 matrices in the order of the registers: for each eight query rows, the warp's first
        # eight tokens, then its other eight. Eight tokens are 16 bytes of a stored row.
        chunk = arith.ori(arith.shli(warp, const(1)), arith.andi(matrix, const(1)))
        chunk = arith.shli(arith.xori(chunk, row), const(4))
        tile = arith.muli(arith.shrui(matrix, const(1)), const(TILE_BYTES))
        at = arith.addi(shared_address(target), arith.addi(tile, arith.shli(row, const(7))))
        at = arith.addi(at, chunk)
        words = words_of(p)
        for first in range(0, len(words), 4):
            some = words[first : first + 4]
            names = ", ".join(f"${1 + i}" for i in range(len(some)))
            text = (
                f"stmatrix.sync.aligned.m8n8.x{len(some)}.trans.shared.b16"
                f" [$0 + {first // 2 * TILE_BYTES}], {{{names}}};"
            )
            asm(text, ",".join(["r"] * (1 + len(some))) + ",~{memory}", at, *some, effects=True)


def reduce_rows(x: jax.Array, kind: str, *, gpu: bool) -> jax.Array:
    """Reduces the columns of ``x`` [64, N] over the rows that a thread holds. ``kind`` is "max" or
    "add". :func:`reduce_threads` completes the reduction."""
    if not gpu:
        return x.max(axis=0) if kind == "max" else x.sum(axis=0)

    @inline(WGMMA, returns=vector_type(x.shape[1]))
    def reduce(x: Registers):
        combine = _REDUCTIONS[kind]
        rows = batched(x.registers.flat, 2)
        results = [
            float_pair(*(combine(item(a, i), item(b, i)) for i in range(2))) for a, b in rows
        ]
        return array(results, (x.shape[1],), COLUMN)

    return reduce(x)


def reduce_threads(x: jax.Array, kind: str, scratch: Ref, *, gpu: bool) -> jax.Array:
    """Reduces per-thread results of :func:`reduce_rows` over the threads of each column, through 4
    N float32 in shared memory that a barrier separates from their last use."""
    if not gpu:
        return x
    (N,) = x.shape

    @inline(COLUMN, REF, returns=vector_type(N))
    def reduce(x: Registers, scratch: ir.Value):
        combine = _REDUCTIONS[kind]
        warp, lane = _warp_and_lane()
        column = arith.shli(arith.andi(lane, const(3)), const(3))
        base = arith.addi(shared_address(scratch), column)
        at = arith.addi(base, arith.muli(warp, const(4 * N)))
        for j, pair in enumerate(x.registers.flat):
            both = [item(pair, i) for i in range(2)]
            for distance in (4, 8, 16):
                both = [combine(value, mgpu.utils.shfl_bfly(value, distance)) for value in both]
            # Eight threads write the same value.
            text = f"st.shared.v2.f32 [$0 + {32 * j}], {{$1, $2}};"
            asm(text, "r,f,f,~{memory}", at, *both, effects=True)
        mgpu.utils.warpgroup_barrier()
        results = []
        for j in range(N // 8):
            warps = [_load_two(base, 4 * N * w + 32 * j) for w in range(4)]
            both = ([pair[i] for pair in warps] for i in range(2))
            results.append(
                float_pair(*(combine(combine(a, b), combine(c, d)) for a, b, c, d in both))
            )
        return array(results, (N,), COLUMN)

    return reduce(x, scratch)


def store_transposed(
    out: Ref, lse: Ref, acc: jax.Array, lse_values: jax.Array, *, gpu: bool, swapped: bool = False
) -> None:
    """Stores ``acc`` [512, N] transposed to ``out`` [N, 512] in global memory, and ``lse`` [N]. If
    ``swapped``, each two 16 rows of ``acc`` are exchanged in every second 64."""
    if not gpu:
        out[...] = acc.T
        lse[...] = lse_values
        return
    N, bytes_ = acc.shape[1], jnp.dtype(acc.dtype).itemsize

    @inline(REF, REF, WGMMA, COLUMN).on(out, lse, acc, lse_values)
    def _(out: ir.Value, lse: ir.Value, acc: Registers, lse_values: Registers):
        (stride, _), _ = ir.MemRefType(out.type).get_strides_and_offset()
        warp, lane = _warp_and_lane()
        high, low = arith.shrui(lane, const(2)), arith.andi(lane, const(3))
        base = global_address(out)
        # bfloat16 is transposed first in matrices of 8 x 8, after which a thread has two columns of
        # one row. With float32 it has one column of two rows.
        row, column = (high, arith.shli(low, const(1))) if bytes_ == 2 else (
            arith.shli(low, const(1)), high)  # fmt: skip
        column = arith.addi(column, arith.shli(warp, const(4)))
        offset = arith.addi(arith.muli(row, const(stride)), column)
        first_at = odd_at = arith.addi(base, arith.extui(i64(), arith.muli(offset, const(bytes_))))
        if swapped:
            odd = arith.subi(const(16), arith.shli(arith.andi(warp, const(1)), const(5)))
            odd = arith.muli(arith.addi(offset, odd), const(bytes_))
            odd_at = arith.addi(base, arith.extui(i64(), odd))
        for number, pair in enumerate(acc.registers.flat):
            m, (j, h) = number // (N // 4), divmod(number % (N // 4), 2)
            at = odd_at if swapped and m % 2 else first_at
            first = (8 * j * stride + 64 * m + 8 * h) * bytes_
            if bytes_ == 2:
                text = f"""{{
                    .reg .b32 t;
                    movmatrix.sync.aligned.m8n8.trans.b16 t, $1;
                    st.global.b32 [$0 + {first}], t;
                }}"""
                asm(text, "l,r,~{memory}", at, llvm.bitcast(i32(), pair), effects=True)
                continue
            for i in range(2):
                text = f"st.global.f32 [$0 + {first + i * stride * bytes_}], $1;"
                asm(text, "l,f,~{memory}", at, item(pair, i), effects=True)
        base = global_address(lse)
        at = arith.addi(base, arith.extui(i64(), arith.shli(low, const(3))))
        thread = arith.ori(warp, high)
        for j, pair in enumerate(lse_values.registers.flat):
            text = f"""{{
                .reg .pred p;
                setp.eq.s32 p, $1, 0;
                @p st.global.v2.f32 [$0 + {32 * j}], {{$2, $3}};
            }}"""
            asm(text, "l,r,f,f,~{memory}", at, thread, item(pair, 0), item(pair, 1),
                effects=True)  # fmt: skip


def vector_type(N: int) -> Any:
    return plgpu.ShapeDtypeStruct((N,), jnp.float32, layout=COLUMN)


def thread_index() -> ir.Value:
    """Returns the thread's number in its warpgroup, read anew at the end of a sequence, so that
    nothing derived from it occupies registers in the main loop."""
    thread = asm("mov.u32 $0, %tid.x;", "=r", result=i32(), effects=True)
    return arith.andi(thread, const(127))


def _warp_and_lane() -> tuple[ir.Value, ir.Value]:
    thread = thread_index()
    return arith.shrui(thread, const(5)), arith.andi(thread, const(31))


def _load_two(base: ir.Value, offset: int) -> list[ir.Value]:
    text = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {offset}];"
    return asm_numbers(text, "=f,=f,r,~{memory}", base, kind=f32(), count=2)


def batched(values: Iterable[Any], count: int) -> list[list[Any]]:
    values = list(values)
    return [values[i : i + count] for i in range(0, len(values), count)]
