"""The Hopper kernel of top_k: radix selection of a row by a cluster of programs.

Scores become integers in the same order. Three passes over the row find the k-th largest of them,
11, 11 and 10 bits at a time: a pass counts, for the integers that begin with the bits found so far,
how often each value of the next bits occurs, and these counts determine the next bits. Then all
larger integers and the first equal ones are chosen, and their indices written.

Each warpgroup has a contiguous part of the row, and counts in its own histogram. The programs of a
cluster exchange the sums of their histograms through global memory. In the end the warpgroups
exchange how many larger and equal integers their parts have, so each knows where in the result its
indices begin. A part of a few thousand scores stays in registers.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int, Int32

from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.warpgroup import meet, sync_cluster
from pallas_kernels.top_k.registers import (
    add_to_histogram,
    layout_of,
    ordered,
    prefix_sums,
    scatter,
    total,
)

CHUNK = 512
"""Scores that a warpgroup loads at a time, four per thread."""

MAX_K = 4096
"""Code without a loop fills the end of the result with -1."""

WARPGROUPS = 4
"""Per program. Each has as many of the 2,048 bins as fit in four registers per thread."""

_INTERPRETED_WARPGROUPS = 2  # the interpreter starts a thread of the host for each
_BINS = 2048
_DIGITS = ((21, 11), (10, 11), (0, 10))
"""(lowest bit, number of bits) of the digits of an integer, from the highest."""
_TOGETHER = 4  # chunks that are loaded before any is used, to hide the latency of the L2 cache
_ADDED_TOGETHER = 4  # programs whose counts are loaded at once; with eight, registers spill
_IN_REGISTERS = 8  # chunks of a warpgroup that stay in registers
_LARGEST = 2**31 - 1
_MINUS_INFINITY = -(2**31) + 2**23 - 1  # the integer of -inf
_DIGIT, _LARGER, _TOTAL, _EQUAL = range(4)  # what warpgroups tell each other
_PASSES = len(_DIGITS)


@lowered_once("k", "programs", "interpret")
def select(
    scores: Float32[Array, "rows S"],
    lengths: Int[Array, " rows"] | None = None,
    *,
    k: int,
    programs: int,
    interpret: Any = None,
) -> Int32[Array, "rows padded_k"]:
    """Returns the indices of the k largest scores of each row, and then -1.

    Args:
      scores: S is a multiple of CHUNK.
      lengths: the chunks of a row after this many scores are not read; None reads all.
      programs: per row.
    """
    (rows, S), C, on_gpu = scores.shape, programs, interpret is None
    W = WARPGROUPS if on_gpu else _INTERPRETED_WARPGROUPS
    padded_k, chunks, parts = -(-k // CHUNK) * CHUNK, S // CHUNK, W * C
    most, width = -(-chunks // parts), _BINS // W  # chunks of a warpgroup
    i32 = jnp.int32
    arrays = (scores,) if lengths is None else (scores, lengths.astype(i32))

    def top_k(scores_g, *refs):
        lengths_g, *refs = refs if lengths is not None else (None, *refs)
        out_g, counts_g, histograms_s, messages_s, scratch_s, barrier, *in_cluster = refs
        overlap_preceding_kernel(interpret=interpret)
        row, wg = lax.axis_index("row"), lax.axis_index("wg")
        rank = lax.axis_index("program") if C > 1 else i32(0)
        part = rank * W + wg
        histogram, scratch = histograms_s.at[wg], scratch_s.at[wg]
        left, share = chunks, most
        if lengths_g is not None:
            left = jnp.minimum(lax.div(lengths_g[row] + CHUNK - 1, i32(CHUNK)), chunks)
            share = lax.div(left + parts - 1, i32(parts))
        first = jnp.minimum(part * share, left)
        end = jnp.minimum(first + share, left)
        bins = plgpu.broadcasted_iota(i32, (_BINS,), 0, layout=layout_of(_BINS))
        own_bins = pl.ds(wg * width, width)
        index = plgpu.broadcasted_iota(i32, (CHUNK,), 0, layout=layout_of(CHUNK))
        sum_of = functools.partial(total, scratch=scratch, interpret=interpret)

        def meet_all():
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

        def meet_cluster():
            sync_cluster(in_cluster, interpret)

        def filled(size, value):
            return plgpu.layout_cast(jnp.full((size,), value, i32), layout_of(size))

        def load(chunk):
            scores = scores_g[row, pl.ds(jnp.minimum(chunk, chunks - 1) * CHUNK, CHUNK)]
            return ordered(plgpu.layout_cast(scores, layout_of(CHUNK)))

        own_keys = [load(first + j) for j in range(most)] if most <= _IN_REGISTERS else None

        def for_chunks(use, carry, smallest):
            """Calls ``use(chunk, keys, smallest, carry)`` for the chunks of this warpgroup's part.

            For chunks past its end, ``smallest`` is larger than all keys.
            """

            def limit(number):
                return jnp.where(number < end, smallest, _LARGEST)

            if own_keys is not None:
                for j, keys in enumerate(own_keys):
                    carry = use(first + j, keys, limit(first + j), carry)
                return carry

            def use_together(i, carry):
                numbers = [first + i * _TOGETHER + j for j in range(_TOGETHER)]
                keys = [load(number) for number in numbers]
                for number, of_chunk in zip(numbers, keys, strict=True):
                    carry = use(number, of_chunk, limit(number), carry)
                return carry

            return lax.fori_loop(
                0, lax.div(end - first + _TOGETHER - 1, i32(_TOGETHER)), use_together, carry
            )

        def tell(number, item, value):
            """Stores a number for the other warpgroups of the program."""
            positions = jnp.where(index == 0, filled(CHUNK, 0), filled(CHUNK, -1))
            target = messages_s.at[number, item, wg]
            scatter(target, positions, filled(CHUNK, value), interpret=interpret)

        def messages(number, item):
            return [messages_s[number, item, w, 0] for w in range(W)]

        def find_digit(number, prefix, wanted, larger_own):
            """Finds the next digit of the integer that is the ``wanted``-th largest with a prefix.

            Args:
              prefix: the bits found so far.
              larger_own: larger integers in this warpgroup's part.

            Returns:
              The prefix with the digit; ``wanted`` among those with it; ``larger_own``; and how
              many in this part have it.
            """
            low, size = _DIGITS[number]
            histogram[...] = filled(_BINS, 0)
            tell(number, _DIGIT, -1)
            tell(number, _LARGER, -1)
            meet(interpret)

            def count_chunk(chunk, keys, smallest, _):
                del chunk
                if not number:  # the first digit has the sign
                    digits = lax.shift_right_arithmetic(keys, filled(CHUNK, low)) + _BINS // 2
                    counted = keys > smallest
                else:
                    digits = lax.shift_right_arithmetic(keys, filled(CHUNK, low)) & (2**size - 1)
                    high = lax.shift_right_arithmetic(keys, filled(CHUNK, low + size))
                    counted = (high == prefix) & (keys > smallest)
                digits = jnp.where(counted, digits, filled(CHUNK, -1))
                add_to_histogram(histogram, digits, interpret=interpret)

            for_chunks(count_chunk, None, i32(_MINUS_INFINITY))
            meet_all()
            of_all = [
                plgpu.layout_cast(histograms_s[w, own_bins], layout_of(width)) for w in range(W)
            ]
            counts = functools.reduce(jnp.add, of_all)
            if C > 1:
                counts_g[row, number, rank, own_bins] = counts
                meet_cluster()

                def add_some(i, counts):
                    of_some = [
                        plgpu.layout_cast(
                            counts_g[row, number, i * some + r, own_bins], layout_of(width)
                        )
                        for r in range(some)
                    ]
                    return functools.reduce(jnp.add, of_some, counts)

                some = min(C, _ADDED_TOGETHER)
                counts = lax.fori_loop(0, C // some, add_some, filled(width, 0))
            before, of_own = prefix_sums(counts, scratch, interpret=interpret)
            tell(number, _TOTAL, of_own)
            meet_all()
            totals = messages(number, _TOTAL)
            if wanted is None:  # the first pass knows how many there are
                wanted = jnp.minimum(k, functools.reduce(jnp.add, totals))
            above = functools.reduce(
                jnp.add, [jnp.where(w >= wg, of_wg, 0) for w, of_wg in enumerate(totals)]
            )
            larger = filled(width, above) - before - counts
            at = (larger < wanted) & (larger + counts >= wanted)  # of one bin
            own_index = plgpu.broadcasted_iota(i32, (width,), 0, layout=layout_of(width))
            positions = jnp.where(at, filled(width, 0), filled(width, -1))
            for item, value in ((_DIGIT, own_index + wg * width), (_LARGER, larger)):
                scatter(messages_s.at[number, item, wg], positions, value, interpret=interpret)
            meet_all()
            digit = functools.reduce(jnp.maximum, messages(number, _DIGIT))
            larger = functools.reduce(jnp.maximum, messages(number, _LARGER))
            nothing = digit < 0  # there is no finite score
            digit = jnp.where(nothing, 2**size - 1, digit)
            own = plgpu.layout_cast(histogram[...], layout_of(_BINS))
            larger_own += sum_of(jnp.where(bins > digit, own, filled(_BINS, 0)))
            prefix = digit - _BINS // 2 if not number else lax.shift_left(prefix, i32(size)) | digit
            wanted_left = wanted - jnp.where(nothing, 0, larger)
            return (prefix, wanted_left, larger_own), histogram[digit], wanted

        state: Any = i32(0), None, i32(0)
        chosen_count: Any = None
        equal_own: Any = None
        for number in range(_PASSES):
            state, equal_own, wanted = find_digit(number, *state)
            chosen_count = wanted if chosen_count is None else chosen_count
        threshold, ties, larger_own = state

        tell(_PASSES, _LARGER, larger_own)
        tell(_PASSES, _EQUAL, equal_own)
        meet_all()
        of_program = list(zip(messages(_PASSES, _LARGER), messages(_PASSES, _EQUAL), strict=True))
        # Larger and equal integers of the parts before this one, first in this program.
        before = tuple(
            functools.reduce(
                jnp.add, [jnp.where(w < wg, pair[i], 0) for w, pair in enumerate(of_program)]
            )
            for i in range(2)
        )
        if C > 1:

            @when(wg == 0)
            def _():
                numbers = filled(CHUNK, 0)
                for i in range(2):
                    sum_of_program = functools.reduce(jnp.add, [pair[i] for pair in of_program])
                    numbers = jnp.where(index == i, filled(CHUNK, sum_of_program), numbers)
                counts_g[row, _PASSES, rank, pl.ds(0, CHUNK)] = numbers

            meet_cluster()
            before = tuple(
                functools.reduce(
                    jnp.add,
                    [jnp.where(r < rank, counts_g[row, _PASSES, r, i], 0) for r in range(C)],
                    of_program_before,
                )
                for i, of_program_before in enumerate(before)
            )

        # The interpreter cannot scatter from several threads: each has its own result.
        target = out_g.at[row, 0 if on_gpu else part]
        if on_gpu:

            @when(part == 0)
            def _():
                for c in range(0, padded_k, CHUNK):
                    positions = jnp.where(index + c >= chosen_count, index + c, filled(CHUNK, -1))
                    scatter(target, positions, filled(CHUNK, -1), interpret=None)
        else:
            target[...] = filled(padded_k, -1)

        def write_chunk(chunk, keys, threshold, before):
            """Writes a chunk's indices, after ``before`` larger and equal ones."""
            larger_before, equal_before = before
            larger, equal = keys > threshold, keys == threshold
            # Both kinds are counted at once, in halves of an integer.
            ones = jnp.where(larger, filled(CHUNK, 1), filled(CHUNK, 0))
            ones = jnp.where(equal, filled(CHUNK, 2**16), ones)
            sums, of_chunk = prefix_sums(ones, scratch, interpret=interpret)
            equal_ranks = lax.shift_right_logical(sums, filled(CHUNK, 16)) + equal_before
            positions = (sums & (2**16 - 1)) + larger_before + jnp.minimum(equal_ranks, ties)
            chosen = larger | (equal & (equal_ranks < ties))
            positions = jnp.where(chosen, positions, filled(CHUNK, -1))
            scatter(target, positions, index + chunk * CHUNK, interpret=interpret)
            return (
                larger_before + (of_chunk & (2**16 - 1)),
                equal_before + lax.shift_right_logical(of_chunk, i32(16)),
            )

        for_chunks(write_chunk, before, threshold)

    launch: dict[str, Any] = {"grid": (rows,), "grid_names": ("row",)}
    barriers: list[Any] = [plgpu.Barrier(num_arrivals=W)]
    if C > 1:
        launch |= {"cluster": (C,), "cluster_names": ("program",)}
        if not on_gpu:
            barriers.append(plgpu.ClusterBarrier(collective_axes=("program",), num_arrivals=W))
    if not on_gpu:
        launch["interpret"] = interpret
    results = 1 if on_gpu else parts
    out, _ = plgpu.kernel(
        top_k,
        out_type=[
            jax.ShapeDtypeStruct((rows, results, padded_k), i32),
            jax.ShapeDtypeStruct((rows, _PASSES + 1, C, _BINS), i32),
        ],
        scratch_types=[
            plgpu.SMEM((W, _BINS), i32),
            plgpu.SMEM((_PASSES + 1, 4, W, 4), i32),
            plgpu.SMEM((W, 4), i32),
            *barriers,
        ],
        num_threads=W,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **launch,
    )(*arrays)
    return out.max(axis=1) if results > 1 else out[:, 0]
