"""top_k on Hopper GPUs: radix selection of a row by a cluster of CTAs.

Scores become integers in the same order. Three passes over the row find the k-th largest of them,
11, 11 and 10 bits at a time: a pass counts, for the integers that begin with the bits found so far,
how often each value of the next bits occurs, and these counts determine the next bits. Then all
larger integers and the first equal ones are chosen, and their indices written.

Each warpgroup has a contiguous part of the row, and counts in its own histogram. The CTAs of a
cluster exchange the sums of their histograms through global memory. In the end the warpgroups
exchange how many larger and equal integers their parts have, so each knows where in the result its
indices begin. A part of a few thousand scores stays in registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float32, Int, Int32

from pallas_kernels.hopper import Index, Ref, multiprocessors, require_hopper
from pallas_kernels.hopper.ir import (
    INT32,
    REF,
    Registers,
    array,
    asm,
    const,
    global_address,
    i32,
    inline,
    numbers_of,
    shared_address,
    warp_and_lane,
    warp_prefix_sum,
)
from pallas_kernels.hopper.launch import grid_kernel, overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.warpgroup import sync_cluster, sync_warpgroup, when

CHUNK = 512  # scores that a warpgroup loads at a time, four per thread
MAX_K = 4096  # code without a loop fills the end of the result with -1
WARPGROUPS = 4  # Per CTA. Each has as many of the 2,048 bins as fit in four registers per thread.
_INTERPRETED_WARPGROUPS = 2  # the interpreter starts a thread of the host for each
_MOST_CTAS = 8  # of a cluster that every Hopper GPU can launch
_BINS = 2048
_DIGITS = ((21, 11), (10, 11), (0, 10))
"""(lowest bit, number of bits) of the digits of an integer, from the highest."""
_PASSES = len(_DIGITS)
_TOGETHER = 4  # chunks that are loaded before any is used, to hide the latency of the L2 cache
_ADDED_TOGETHER = 4  # CTAs whose counts are loaded at once; with eight, registers spill
_IN_REGISTERS = 8  # chunks of a warpgroup that stay in registers
_LARGEST = 2**31 - 1
_MINUS_INFINITY = -(2**31) + 2**23 - 1  # the integer of -inf
_DIGIT, _LARGER, _TOTAL, _EQUAL = range(4)  # numbers that warpgroups of a CTA exchange
_PER_REGISTER = 4  # numbers of a thread that are adjacent


def top_k(
    scores: Float32[Array, "*batch S"],
    k: int,
    *,
    lengths: Int[Array, "*batch"] | None = None,
    interpret: Any = None,
) -> Int32[Array, "*batch k"]:
    """Implements :func:`pallas_kernels.top_k`."""
    require_hopper(interpret)
    if k > MAX_K:
        raise NotImplementedError(f"takes k of {MAX_K} at most, got {k}")
    if 0 in scores.shape:
        raise NotImplementedError(f"takes no empty arrays, got {scores.shape}")
    *batch, S = scores.shape
    rows = jax.lax.stop_gradient(scores).reshape(-1, S)
    # Kernels read whole chunks. Tables of 8 pages of 64 tokens or a multiple need no padding.
    padded = jnp.pad(rows, ((0, 0), (0, -S % CHUNK)), constant_values=-jnp.inf)
    ctas = plan(len(rows), padded.shape[1])
    lengths = None if lengths is None else lengths.reshape(-1)
    chosen = select(padded, lengths, k=k, ctas=ctas, interpret=interpret)
    return chosen[:, :k].reshape(*batch, k)


def plan(rows: int, S: int) -> int:
    """Returns the number of CTAs that share a row of S scores. All CTAs run at once, and each of
    their warpgroups has at least one chunk."""
    ctas = _MOST_CTAS
    while ctas > 1 and (rows * ctas > multiprocessors() or ctas * WARPGROUPS * CHUNK > S):
        ctas //= 2
    return ctas


@lowered_once("k", "ctas", "interpret")
def select(
    scores: Float32[Array, "rows S"],
    lengths: Int[Array, " rows"] | None = None,
    *,
    k: int,
    ctas: int,
    interpret: Any = None,
) -> Int32[Array, "rows padded_k"]:
    """Returns the indices of the k largest scores of each row, and then -1. S is a multiple of
    CHUNK. The chunks of a row after ``lengths`` scores are not read; None reads all."""
    rows, on_gpu = len(scores), interpret is None
    W = WARPGROUPS if on_gpu else _INTERPRETED_WARPGROUPS
    padded_k = -(-k // CHUNK) * CHUNK
    arrays = (scores,) if lengths is None else (scores, lengths.astype(jnp.int32))

    def top_k(scores_g, *refs):
        lengths_g, *refs = refs if lengths is not None else (None, *refs)
        overlap_preceding_kernel(interpret=interpret)
        part = _Part(scores_g, lengths_g, *refs, k=k, ctas=ctas, warpgroups=W, interpret=interpret)
        prefix, larger = jnp.int32(0), jnp.int32(0)
        wanted: Any = None
        chosen: Any = None
        equal: Any = None
        for number in range(_PASSES):
            (prefix, left, larger), equal, wanted = part.find_digit(number, prefix, wanted, larger)
            chosen, wanted = wanted if chosen is None else chosen, left
        before = part.count_before(larger, equal)
        part.write_indices(prefix, wanted, chosen, before)

    barriers: list[Any] = [plgpu.Barrier(num_arrivals=W)]
    if ctas > 1 and not on_gpu:
        barriers.append(plgpu.ClusterBarrier(collective_axes=("cta",), num_arrivals=W))
    results = 1 if on_gpu else W * ctas
    out, _ = grid_kernel(
        top_k,
        [
            jax.ShapeDtypeStruct((rows, results, padded_k), jnp.int32),
            jax.ShapeDtypeStruct((rows, _PASSES + 1, ctas, _BINS), jnp.int32),
        ],
        [
            plgpu.SMEM((W, _BINS), jnp.int32),
            plgpu.SMEM((_PASSES + 1, 4, W, 4), jnp.int32),
            plgpu.SMEM((W, 4), jnp.int32),
            *barriers,
        ],
        warpgroups=W,
        grid={"row": rows},
        cluster={"cta": ctas} if ctas > 1 else None,
        interpret=interpret,
        reduction_scratch_bytes=0,
    )(*arrays)
    return out.max(axis=1) if results > 1 else out[:, 0]


class _Part:
    """A warpgroup and its part of the row. All warpgroups of a cluster call each method."""

    def __init__(
        self, scores_g: Ref, lengths_g: Ref, out_g: Ref, counts_g: Ref, histograms_s: Ref,
        exchange_s: Ref, scratch_s: Ref, barrier: Any, *cluster_barriers: Any, k: int, ctas: int,
        warpgroups: int, interpret: Any,
    ) -> None:  # fmt: skip
        self.scores_g, self.out_g, self.counts_g = scores_g, out_g, counts_g
        self.histograms_s, self.exchange_s = histograms_s, exchange_s
        self.barrier, self.cluster_barriers = barrier, cluster_barriers
        self.k, self.ctas, self.warpgroups, self.interpret = k, ctas, warpgroups, interpret
        self.row, self.wg = lax.axis_index("row"), lax.axis_index("wg")
        self.cta = lax.axis_index("cta") if ctas > 1 else jnp.int32(0)
        self.number = self.cta * warpgroups + self.wg
        self.histogram, self.scratch = histograms_s.at[self.wg], scratch_s.at[self.wg]
        self.chunks, parts = scores_g.shape[1] // CHUNK, warpgroups * ctas
        most = -(-self.chunks // parts)
        left, share = self.chunks, most
        if lengths_g is not None:
            left = jnp.minimum(
                lax.div(lengths_g[self.row] + CHUNK - 1, jnp.int32(CHUNK)), self.chunks
            )
            share = lax.div(left + parts - 1, jnp.int32(parts))
        self.first = jnp.minimum(self.number * share, left)
        self.end = jnp.minimum(self.first + share, left)
        self.bins = _iota(_BINS)
        self.width = _BINS // warpgroups
        self.bins_of_wg = pl.ds(self.wg * self.width, self.width)
        """Bins whose counts over all parts this warpgroup adds."""
        self.index = _iota(CHUNK)
        self.keys: Any = None
        """The part's integers, if they stay in registers."""
        if most <= _IN_REGISTERS:
            self.keys = [self.load(self.first + j) for j in range(most)]

    def load(self, chunk: Index) -> jax.Array:
        """Loads a chunk as integers in the order of the scores; -0 becomes 0. The constant must not
        be the first operand of a select: see ``lanes.select``."""
        start = jnp.minimum(chunk, self.chunks - 1) * CHUNK
        scores = self.scores_g[self.row, pl.ds(start, CHUNK)]
        scores = plgpu.layout_cast(scores, _layout_of(CHUNK))
        bits = lax.bitcast_convert_type(scores, jnp.int32)
        bits = jnp.where(scores != 0.0, bits, jnp.zeros_like(bits))
        return jnp.where(bits < 0, bits ^ _LARGEST, bits)

    def for_chunks(self, use: Callable[..., Any], carry: Any, smallest: jax.Array) -> None:
        """Calls ``use(chunk, keys, smallest, carry)`` for the part's chunks. For chunks past its
        end, ``smallest`` is larger than all keys."""

        def limit(number):
            return jnp.where(number < self.end, smallest, _LARGEST)

        if self.keys is not None:
            for j, keys in enumerate(self.keys):
                carry = use(self.first + j, keys, limit(self.first + j), carry)
            return

        def use_together(i, carry):
            numbers = [self.first + i * _TOGETHER + j for j in range(_TOGETHER)]
            keys = [self.load(number) for number in numbers]
            for number, keys_of_chunk in zip(numbers, keys, strict=True):
                carry = use(number, keys_of_chunk, limit(number), carry)
            return carry

        count = lax.div(self.end - self.first + _TOGETHER - 1, jnp.int32(_TOGETHER))
        lax.fori_loop(0, count, use_together, carry)

    def find_digit(
        self, number: int, prefix: jax.Array, wanted: jax.Array | None, larger_of_part: jax.Array
    ) -> Any:
        """Finds the next digit of the integer that is the ``wanted``-th largest with a prefix. The
        first pass finds out how many there are. Returns the longer prefix, ``wanted`` among those
        with it, and the larger integers in this part; how many in this part have it; and the old
        ``wanted``."""
        size = _DIGITS[number][1]
        self.count_digits(number, prefix)
        counts = self.add_counts(number)
        before, total = _prefix_sums(counts, self.scratch, interpret=self.interpret)
        self.send(number, _TOTAL, total)
        self.sync_cta()
        totals = self.receive(number, _TOTAL)
        if wanted is None:
            wanted = jnp.minimum(self.k, functools.reduce(jnp.add, totals))
        above = functools.reduce(
            jnp.add, [jnp.where(w >= self.wg, total, 0) for w, total in enumerate(totals)]
        )
        larger = _filled(self.width, above) - before - counts
        is_digit = (larger < wanted) & (larger + counts >= wanted)  # of one bin of all warpgroups
        bins = _iota(self.width)
        positions = jnp.where(is_digit, _filled(self.width, 0), _filled(self.width, -1))
        for kind, value in ((_DIGIT, bins + self.wg * self.width), (_LARGER, larger)):
            target = self.exchange_s.at[number, kind, self.wg]
            _scatter(target, positions, value, interpret=self.interpret)
        self.sync_cta()
        digit = functools.reduce(jnp.maximum, self.receive(number, _DIGIT))
        larger = functools.reduce(jnp.maximum, self.receive(number, _LARGER))
        nothing = digit < 0  # there is no finite score
        digit = jnp.where(nothing, 2**size - 1, digit)
        counts = plgpu.layout_cast(self.histogram[...], _layout_of(_BINS))
        counts = jnp.where(self.bins > digit, counts, _filled(_BINS, 0))
        larger_of_part += _prefix_sums(counts, self.scratch, interpret=self.interpret)[1]
        longer = lax.shift_left(prefix, jnp.int32(size)) | digit if number else digit - _BINS // 2
        left = wanted - jnp.where(nothing, 0, larger)
        return (longer, left, larger_of_part), self.histogram[digit], wanted

    def count_digits(self, number: int, prefix: jax.Array) -> None:
        """Counts the digits of the part's integers with this prefix in its histogram."""
        low, size = _DIGITS[number]
        self.histogram[...] = _filled(_BINS, 0)
        self.send(number, _DIGIT, -1)
        self.send(number, _LARGER, -1)
        sync_warpgroup(self.interpret)

        def count_chunk(chunk, keys, smallest, _):
            del chunk
            if not number:  # the first digit has the sign
                digits = lax.shift_right_arithmetic(keys, _filled(CHUNK, low)) + _BINS // 2
                counted = keys > smallest
            else:
                digits = lax.shift_right_arithmetic(keys, _filled(CHUNK, low)) & (2**size - 1)
                high = lax.shift_right_arithmetic(keys, _filled(CHUNK, low + size))
                counted = (high == prefix) & (keys > smallest)
            digits = jnp.where(counted, digits, _filled(CHUNK, -1))
            _add_to_histogram(self.histogram, digits, interpret=self.interpret)

        self.for_chunks(count_chunk, None, jnp.int32(_MINUS_INFINITY))
        self.sync_cta()

    def add_counts(self, number: int) -> jax.Array:
        """Returns the sums over all histograms of the cluster, for this warpgroup's bins."""
        layout = _layout_of(self.width)
        histograms = [  # JAX 0.10 takes a load and its layout_cast only together
            plgpu.layout_cast(self.histograms_s[w, self.bins_of_wg], layout)
            for w in range(self.warpgroups)
        ]
        counts = functools.reduce(jnp.add, histograms)
        if self.ctas == 1:
            return counts
        self.counts_g[self.row, number, self.cta, self.bins_of_wg] = counts
        sync_cluster(self.cluster_barriers, self.interpret)
        some = min(self.ctas, _ADDED_TOGETHER)

        def add_some(i, counts):
            def load(cta):
                counts = self.counts_g[self.row, number, cta, self.bins_of_wg]
                return plgpu.layout_cast(counts, layout)

            loaded = [load(i * some + r) for r in range(some)]
            return functools.reduce(jnp.add, loaded, counts)

        return lax.fori_loop(0, self.ctas // some, add_some, _filled(self.width, 0))

    def count_before(self, larger: jax.Array, equal: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the larger and the equal integers of all parts before this one."""
        self.send(_PASSES, _LARGER, larger)
        self.send(_PASSES, _EQUAL, equal)
        self.sync_cta()
        both = [self.receive(_PASSES, kind) for kind in (_LARGER, _EQUAL)]
        before = tuple(
            functools.reduce(jnp.add, [jnp.where(w < self.wg, n, 0) for w, n in enumerate(numbers)])
            for numbers in both
        )
        if self.ctas == 1:
            return before

        @when(self.wg == 0)
        def _() -> None:
            numbers = _filled(CHUNK, 0)
            for i in range(2):
                sum_of_cta = functools.reduce(jnp.add, both[i])
                numbers = jnp.where(self.index == i, _filled(CHUNK, sum_of_cta), numbers)
            self.counts_g[self.row, _PASSES, self.cta, pl.ds(0, CHUNK)] = numbers

        sync_cluster(self.cluster_barriers, self.interpret)

        def in_ctas_before(i: int) -> list[jax.Array]:
            return [
                jnp.where(r < self.cta, self.counts_g[self.row, _PASSES, r, i], 0)
                for r in range(self.ctas)
            ]

        return tuple(
            functools.reduce(jnp.add, in_ctas_before(i), in_cta) for i, in_cta in enumerate(before)
        )

    def write_indices(
        self, threshold: jax.Array, ties: jax.Array, chosen: jax.Array, before: Any
    ) -> None:
        """Writes the indices of this part's integers above the threshold, and of the first ``ties``
        equal ones of the row. ``chosen`` counts both; ``before`` is of :meth:`count_before`."""
        padded_k = self.out_g.shape[2]
        # The interpreter cannot scatter from several threads: each has its own result.
        target = self.out_g.at[self.row, 0 if self.interpret is None else self.number]
        if self.interpret is None:

            @when(self.number == 0)
            def _() -> None:
                for c in range(0, padded_k, CHUNK):
                    position = self.index + c
                    positions = jnp.where(position >= chosen, self.index + c, _filled(CHUNK, -1))
                    _scatter(target, positions, _filled(CHUNK, -1), interpret=None)
        else:
            target[...] = _filled(padded_k, -1)

        def write_chunk(chunk, keys, threshold, before):
            """Writes a chunk's indices, after ``before`` larger and equal ones."""
            larger_before, equal_before = before
            larger, equal = keys > threshold, keys == threshold
            # Both kinds are counted at once, in halves of an integer.
            ones = jnp.where(larger, _filled(CHUNK, 1), _filled(CHUNK, 0))
            ones = jnp.where(equal, _filled(CHUNK, 2**16), ones)
            sums, of_chunk = _prefix_sums(ones, self.scratch, interpret=self.interpret)
            equal_ranks = lax.shift_right_logical(sums, _filled(CHUNK, 16)) + equal_before
            positions = (sums & (2**16 - 1)) + larger_before + jnp.minimum(equal_ranks, ties)
            is_chosen = larger | (equal & (equal_ranks < ties))
            positions = jnp.where(is_chosen, positions, _filled(CHUNK, -1))
            _scatter(target, positions, self.index + chunk * CHUNK, interpret=self.interpret)
            return (
                larger_before + (of_chunk & (2**16 - 1)),
                equal_before + lax.shift_right_logical(of_chunk, jnp.int32(16)),
            )

        self.for_chunks(write_chunk, before, threshold)

    def send(self, number: int, kind: int, value: Any) -> None:
        """Stores a number for the other warpgroups of the CTA."""
        positions = jnp.where(self.index == 0, _filled(CHUNK, 0), _filled(CHUNK, -1))
        target = self.exchange_s.at[number, kind, self.wg]
        _scatter(target, positions, _filled(CHUNK, value), interpret=self.interpret)

    def receive(self, number: int, kind: int) -> list[jax.Array]:
        """Returns the numbers of all warpgroups of the CTA."""
        return [self.exchange_s[number, kind, w, 0] for w in range(self.warpgroups)]

    def sync_cta(self) -> None:
        plgpu.barrier_arrive(self.barrier)
        plgpu.barrier_wait(self.barrier)


def _layout_of(size: int) -> Any:
    """Returns the layout of a vector in which each thread has groups of four adjacent numbers, or
    all if it has fewer."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=min(_PER_REGISTER, size // 128))


def _iota(size: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=_layout_of(size))


def _filled(size: int, value: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full((size,), value, jnp.int32), _layout_of(size))


def _add_to_histogram(histogram: Ref, digits: jax.Array, *, interpret: Any) -> None:
    """Adds 1 to ``histogram[digit]`` in shared memory for each digit that is not negative."""
    if interpret is not None:
        counts = histogram[...]
        histogram[...] = counts.at[jnp.where(digits < 0, counts.size, digits)].add(1, mode="drop")
        return

    @inline(REF, _layout_of(digits.size)).on(histogram, digits)
    def _(histogram: ir.Value, digits: Registers) -> None:
        base = shared_address(histogram)
        text = """{
            .reg .pred there;
            .reg .b32 at;
            setp.ge.s32 there, $1, 0;
            shl.b32 at, $1, 2;
            add.u32 at, at, $0;
            @there red.shared.add.u32 [at], 1;
        }"""
        for digit in numbers_of(digits):
            asm(text, "r,r,~{memory}", base, digit, effects=True)


def _scatter(target: Ref, positions: jax.Array, values: jax.Array, *, interpret: Any) -> None:
    """Sets ``target[position] = value`` for positions that are not negative."""
    if interpret is not None:
        old = target[...]
        positions = jnp.where(positions < 0, old.size, positions)
        target[...] = old.at[positions].set(values, mode="drop")
        return

    @inline(REF, _layout_of(values.size), _layout_of(values.size)).on(target, positions, values)
    def _(target: ir.Value, positions: Registers, values: Registers) -> None:
        is_shared = mgpu.utils.is_smem_ref(target)
        base = shared_address(target) if is_shared else global_address(target)
        space, bits, letter = ("shared", 32, "r") if is_shared else ("global", 64, "l")
        at = "mad.lo.s32 at, $1, 4, $0;" if is_shared else "mad.wide.s32 at, $1, 4, $0;"
        text = f"""{{
            .reg .pred there;
            .reg .b{bits} at;
            setp.ge.s32 there, $1, 0;
            {at}
            @there st.{space}.b32 [at], $2;
        }}"""
        for position, value in zip(numbers_of(positions), numbers_of(values), strict=True):
            asm(text, f"{letter},r,r,~{{memory}}", base, position, value, effects=True)


def _prefix_sums(values: jax.Array, scratch: Ref, *, interpret: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the numbers before each of ``values``, correct if threads have four of
    them, and the sum of all. All threads of a warpgroup call it, with a ``scratch`` of int32 [4] in
    shared memory of their own."""
    if interpret is not None:
        sums = jnp.cumsum(values, dtype=jnp.int32)
        return sums - values, sums[-1]
    layout = _layout_of(values.size)
    numbers = plgpu.ShapeDtypeStruct(values.shape, jnp.int32, layout=layout)

    @inline(layout, REF, returns=(numbers, INT32))
    def scan(values: Registers, scratch: ir.Value) -> tuple[Registers, ...]:
        before = [const(0)]
        for value in numbers_of(values):
            before.append(arith.addi(before[-1], value))
        warp, lane = warp_and_lane()
        inclusive = warp_prefix_sum(before[-1])
        base = shared_address(scratch)
        at = arith.addi(base, arith.shli(warp, const(2)))
        is_last = arith.cmpi(arith.CmpIPredicate.eq, lane, const(31))
        asm("@$2 st.shared.b32 [$0], $1;", "r,r,b,~{memory}", at, inclusive, is_last, effects=True)
        mgpu.utils.warpgroup_barrier()
        text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
        four = llvm.StructType.get_literal([i32()] * 4)
        loaded = asm(text, "=r,=r,=r,=r,r,~{memory}", base, result=four, effects=True)
        mgpu.utils.warpgroup_barrier()  # the scratch may be written again
        sums_of_warps = [llvm.extractvalue(i32(), loaded, [i]) for i in range(4)]
        offset, total = arith.subi(inclusive, before[-1]), const(0)
        for i, sum_of_warp in enumerate(sums_of_warps):
            is_before = arith.cmpi(arith.CmpIPredicate.sgt, warp, const(i))
            offset = arith.addi(offset, arith.select(is_before, sum_of_warp, const(0)))
            total = arith.addi(total, sum_of_warp)
        sums = [arith.addi(offset, each) for each in before[:-1]]
        kind = ir.VectorType.get((_PER_REGISTER,), i32())
        registers = [
            vector.from_elements(kind, sums[i : i + _PER_REGISTER])
            for i in range(0, len(sums), _PER_REGISTER)
        ]
        return (
            array(registers, values.shape, layout, is_signed=True),
            mgpu.FragmentedArray.splat(total, (), is_signed=True),
        )

    return scan(values, scratch)
