"""The Hopper kernel of top_k: radix selection of a row by one program.

Scores become integers in the same order. Three passes over the row find the k-th largest of them,
11, 11 and 10 bits at a time: a pass counts, for the integers that begin with the bits found so far,
how often each value of the next bits occurs, and these counts determine the next bits. A fourth
pass writes the indices of all larger integers and of the first equal ones. A warpgroup has its own
histogram and a contiguous part of the row, whose place in the result follows from the histograms of
the parts before it, so the indices are in order. A row of 131,072 scores (512 KB) stays in the L2
cache. Each pass takes a multiprocessor about 5 us, at 64 bytes per cycle.
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
from pallas_kernels.hopper.warpgroup import meet
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
_BINS = 2048
_DIGITS = ((21, 11), (10, 11), (0, 10))
"""(lowest bit, number of bits) of the digits of an integer, from the highest."""
_TOGETHER = 4  # chunks that are loaded before any is used, to hide the latency of the L2 cache
_LARGEST = 2**31 - 1
_MINUS_INFINITY = -(2**31) + 2**23 - 1  # the integer of -inf


@functools.partial(jax.jit, static_argnames=("k", "warpgroups", "interpret"))
def select(
    scores: Float32[Array, "rows S"],
    lengths: Int[Array, " rows"] | None = None,
    *,
    k: int,
    warpgroups: int,
    interpret: Any = None,
) -> Int32[Array, "rows padded_k"]:
    """Returns the indices of the k largest scores of each row, and then -1.

    Args:
      scores: S is a multiple of CHUNK.
      lengths: the chunks of a row after this many scores are not read; None reads all.
    """
    (rows, S), W = scores.shape, warpgroups
    padded_k = -(-k // CHUNK) * CHUNK
    i32 = jnp.int32
    arrays = (scores,) if lengths is None else (scores, lengths.astype(i32))

    def top_k(scores_g, *refs):
        lengths_g, out_g, histograms_s, counts_s, out_s, scratch_s, barrier = (
            (None, *refs) if lengths is None else refs
        )
        row, wg = lax.axis_index("row"), lax.axis_index("wg")
        histogram, scratch = histograms_s.at[wg], scratch_s.at[wg]
        if lengths_g is None:
            chunks = S // CHUNK
            share = -(-chunks // W)
        else:
            chunks = jnp.minimum(lax.div(lengths_g[row] + CHUNK - 1, i32(CHUNK)), S // CHUNK)
            share = lax.div(chunks + W - 1, i32(W))
        first, end = jnp.minimum(wg * share, chunks), jnp.minimum((wg + 1) * share, chunks)
        bins = plgpu.broadcasted_iota(i32, (_BINS,), 0, layout=layout_of(_BINS))
        sum_of = functools.partial(total, scratch=scratch, interpret=interpret)

        def meet_all():
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

        def load(chunk):
            scores = scores_g[row, pl.ds(jnp.minimum(chunk, chunks - 1) * CHUNK, CHUNK)]
            return ordered(plgpu.layout_cast(scores, layout_of(CHUNK)))

        def for_chunks(use, carry, smallest):
            """Calls ``use(chunk, keys, smallest, carry)`` for the chunks of this warpgroup's part.

            For chunks past its end, ``smallest`` is larger than all keys.
            """

            def use_together(i, carry):
                numbers = [first + i * _TOGETHER + j for j in range(_TOGETHER)]
                keys = [load(number) for number in numbers]
                for number, of_chunk in zip(numbers, keys, strict=True):
                    limit = jnp.where(number < end, smallest, _LARGEST)
                    carry = use(number, of_chunk, limit, carry)
                return carry

            return lax.fori_loop(
                0, lax.div(end - first + _TOGETHER - 1, i32(_TOGETHER)), use_together, carry
            )

        def filled(size, value):
            return plgpu.layout_cast(jnp.full((size,), value, i32), layout_of(size))

        def counts_of(w):
            return plgpu.layout_cast(histograms_s[w], layout_of(_BINS))

        def find_digit(low, size, prefix, wanted, larger_before):
            """Finds the next digit of the integer that is the ``wanted``-th largest with a prefix.

            Args:
              prefix: the bits found so far.
              larger_before: larger integers in the parts before this warpgroup's.

            Returns:
              The prefix with the digit; ``wanted`` among those with it; ``larger_before``; the
              counts of the parts before this warpgroup's.
            """
            histogram[...] = filled(_BINS, 0)
            meet(interpret)

            def count_chunk(chunk, keys, smallest, _):
                del chunk
                if low + size == 32:  # the first digit has the sign
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
            width = _BINS // W
            part = pl.ds(wg * width, width)
            sums = [plgpu.layout_cast(histograms_s[w, part], layout_of(width)) for w in range(W)]
            counts_s[part] = functools.reduce(jnp.add, sums)
            meet_all()
            counts = plgpu.layout_cast(counts_s[...], layout_of(_BINS))
            if wanted is None:  # the first pass knows how many there are
                wanted = jnp.minimum(k, sum_of(counts))

            def bisect(i, digit):
                higher = digit + lax.shift_right_logical(i32(_BINS // 2), i)
                enough = sum_of(jnp.where(bins >= higher, counts, filled(_BINS, 0))) >= wanted
                return jnp.where(enough, higher, digit)

            digit = lax.fori_loop(0, 11, bisect, i32(0))
            above = bins > digit
            larger = sum_of(jnp.where(above, counts, filled(_BINS, 0)))
            # Not a loop of wg steps: it would be unrolled, and need more registers than there are.
            before = filled(_BINS, 0)
            for w in range(W - 1):
                before += counts_of(w) * jnp.where(w < wg, 1, 0)
            larger_before += sum_of(jnp.where(above, before, filled(_BINS, 0)))
            equal_before = sum_of(jnp.where(bins == digit, before, filled(_BINS, 0)))
            meet_all()  # the histograms may be cleared
            if low + size == 32:
                prefix = digit - _BINS // 2
            else:
                prefix = lax.shift_left(prefix, i32(size)) | digit
            return prefix, wanted - larger, larger_before, equal_before

        state: Any = i32(0), None, i32(0)
        equal_before: Any = None
        for low, size in _DIGITS:
            *state, equal_before = find_digit(low, size, *state)
        threshold, ties, larger_before = state

        chosen_s = out_s.at[wg]
        chosen_s[...] = filled(padded_k, -1)
        meet(interpret)

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
            index = plgpu.broadcasted_iota(i32, (CHUNK,), 0, layout=layout_of(CHUNK))
            positions = jnp.where(chosen, positions, filled(CHUNK, -1))
            scatter(chosen_s, positions, index + chunk * CHUNK, interpret=interpret)
            return (
                larger_before + (of_chunk & (2**16 - 1)),
                equal_before + lax.shift_right_logical(of_chunk, i32(16)),
            )

        for_chunks(write_chunk, (larger_before, equal_before), threshold)
        meet_all()

        @when(wg == 0)
        def _():
            of_all = [plgpu.layout_cast(out_s[w], layout_of(padded_k)) for w in range(W)]
            out_g[row] = functools.reduce(jnp.maximum, of_all)

    return plgpu.kernel(
        top_k,
        out_type=jax.ShapeDtypeStruct((rows, padded_k), i32),
        scratch_types=[
            plgpu.SMEM((W, _BINS), i32),
            plgpu.SMEM((_BINS,), i32),
            plgpu.SMEM((W, padded_k), i32),
            plgpu.SMEM((W, 4), i32),
            plgpu.Barrier(num_arrivals=W),
        ],
        grid=(rows,),
        grid_names=("row",),
        num_threads=W,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(*arrays)
