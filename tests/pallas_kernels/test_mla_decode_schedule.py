"""The split-KV schedule of mla_decode's Hopper kernels: which partition processes which blocks."""

import functools

import jax
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.hopper.split_kv import (
    BLOCK,
    Costs,
    Schedule,
    schedule,
)
from pallas_kernels.mla_decode.mosaic_gpu import FEW_ROWS, FEW_ROWS_COSTS
from tests.pallas_kernels.numerics import device

MAX_PAGES = 700
COSTS = Costs()
make = jax.jit(functools.partial(schedule, max_pages=MAX_PAGES), static_argnames="partitions")


def blocks_of(lengths):
    return np.clip(-(-np.asarray(lengths) // BLOCK), 1, MAX_PAGES)


def segments(made: Schedule):
    """Returns (partition, sequence, first block, end block) of every segment, in order."""
    partitions, table = made.partitions, np.asarray(made.table)
    made_segments = []
    for partition, (first_sequence, last_sequence, begin, end) in enumerate(
        table[:partitions].tolist()
    ):
        for sequence in range(first_sequence, last_sequence + 1):
            first = begin if sequence == first_sequence else 0
            made_segments.append(
                (
                    partition,
                    sequence,
                    first,
                    end if sequence == last_sequence else table[partitions + sequence, 0],
                )
            )
    return made_segments


def check_schedule(lengths, partitions):
    """Checks every property that the kernels rely on, and returns the segments."""
    made = make(device(lengths, "int32"), partitions=partitions)
    table, split = np.asarray(made.table), np.asarray(made.split_sequences)
    B = len(lengths)
    assert table.shape == (partitions + B, 4)
    assert split.shape == (partitions, 4)
    assert table.dtype == split.dtype == np.int32
    entries, want_blocks = table[partitions:], blocks_of(lengths)
    np.testing.assert_array_equal(entries[:, 0], want_blocks)
    np.testing.assert_array_equal(entries[:, 3], lengths)

    made_segments = segments(made)
    covered = [(sequence, block) for _, sequence, a, b in made_segments for block in range(a, b)]
    assert covered == [
        (sequence, block) for sequence in range(B) for block in range(want_blocks[sequence])
    ]
    assert all(a < b for _, _, a, b in made_segments)

    partitions_of = [
        [partition for partition, r, _, _ in made_segments if r == sequence]
        for sequence in range(B)
    ]
    for sequence, of_sequence in enumerate(partitions_of):
        assert of_sequence == list(range(of_sequence[0], of_sequence[0] + len(of_sequence))), (
            f"sequence {sequence}"
        )
    assert entries[:, 1].tolist() == [len(of_sequence) for of_sequence in partitions_of]

    partial_indices = [
        entries[sequence, 2] + partition
        for sequence in range(B)
        if len(partitions_of[sequence]) > 1
        for partition in partitions_of[sequence]
    ]
    assert partial_indices == list(range(len(partial_indices)))
    assert len(partial_indices) <= 2 * partitions

    split_ones = [sequence for sequence in range(B) if len(partitions_of[sequence]) > 1]
    want = [
        [sequence, entries[sequence, 2] + partitions_of[sequence][0], len(partitions_of[sequence])]
        for sequence in split_ones
    ]
    assert split[: len(split_ones), :3].tolist() == want
    assert (split[len(split_ones) :, 2] == 0).all()
    assert (split[:, 3] == len(split_ones)).all()

    cost = np.zeros(partitions, int)
    for partition, _, a, b in made_segments:
        cost[partition] += b - a + COSTS.sequence
    share = max(-(-(want_blocks + COSTS.sequence).sum() // partitions), COSTS.min_blocks)
    # A segment that begins inside a sequence pays the sequence's cost again.
    assert cost.max() <= share + max(COSTS.merge + COSTS.partials, COSTS.sequence)
    return made_segments


def adversarial(B, partitions):
    """Yields lengths at and next to the boundaries of blocks, of shares and of the table."""
    longest = MAX_PAGES * BLOCK
    yield np.zeros(B, int)
    yield np.full(B, 1)
    for length in (BLOCK - 1, BLOCK, BLOCK + 1, longest, longest + 3):
        yield np.full(B, length)
    for index in (0, B // 2, B - 1):
        one = np.zeros(B, int)
        one[index] = longest
        yield one
        yield longest - one
    yield np.arange(B) * BLOCK
    yield np.arange(B)[::-1] * BLOCK + 1
    yield np.where(np.arange(B) % 2, 0, longest)
    # Sequences whose costs end at a share's boundary, one block before it and one after it.
    for more in (-1, 0, 1):
        yield np.full(B, (max(partitions // B, 1) * 8 - COSTS.sequence + more) * BLOCK)


# One compilation each: fewer sequences than partitions, as many, more; one of either.
SHAPES = [(1, 1), (1, 7), (7, 1), (2, 132), (16, 16), (128, 66)]
MORE_SHAPES = [pytest.param(*s, marks=pytest.mark.slow) for s in [(3, 5), (64, 66), (300, 33)]]


@pytest.mark.parametrize(("B", "partitions"), [*SHAPES, *MORE_SHAPES])
def test_every_block_once(B, partitions):
    for lengths in adversarial(B, partitions):
        check_schedule(lengths, partitions)
    rng = np.random.default_rng(B)
    for longest in (100, 1000, MAX_PAGES * BLOCK + 100):
        for _ in range(4):
            check_schedule(rng.integers(0, longest, B), partitions)
            check_schedule((longest ** rng.random(B)).astype(int), partitions)


def test_sequences_stay_whole_if_that_finishes_no_later():
    """128 equal sequences: two for each of 64 partitions, and two partitions without work."""
    made_segments = check_schedule(np.full(128, 4096), 66)
    assert [sequence for _, sequence, _, _ in made_segments] == list(range(128))
    assert (
        np.bincount([partition for partition, *_ in made_segments], minlength=66).tolist()
        == [2] * 64 + [0] * 2
    )


def test_few_long_sequences_are_split():
    """One sequence over 132 partitions: 700 blocks in sixes, 9 blocks in fours."""
    for blocks, want in ((MAX_PAGES, [6] * 116 + [4]), (9, [4, 4, 1])):
        made_segments = check_schedule(np.array([blocks * BLOCK]), 132)
        assert [b - a for _, _, a, b in made_segments] == want


def test_sequences_stay_whole_if_merging_costs_more_than_it_saves():
    """Four sequences for each of 32 of the 33 partitions, eight blocks above the even share. They
    are split when they are twice as long."""
    for length, cut in ((4096, False), (8192, True)):
        made_segments = check_schedule(np.full(128, length), 33)
        assert (len(made_segments) > 128) == cut


@pytest.mark.slow
@pytest.mark.parametrize(("queries", "heads", "tiles"), [(1, 8, 1), (1, 128, 2), (2, 72, 3)])
def test_public_schedule_fills_the_device(queries, heads, tiles):
    lengths = device([100, 5000], "int32")
    public = functools.partial(
        pallas_kernels.mla_decode_schedule, queries=queries, heads=heads, max_pages=100
    )
    made = jax.jit(public)(lengths)
    assert made.partitions == multiprocessors() // tiles
    costs = FEW_ROWS_COSTS if queries * heads <= FEW_ROWS else None
    own = functools.partial(schedule, max_pages=100, partitions=made.partitions, costs=costs)
    want = jax.jit(own)(lengths)
    np.testing.assert_array_equal(made.table, want.table)
    np.testing.assert_array_equal(made.split_sequences, want.split_sequences)
