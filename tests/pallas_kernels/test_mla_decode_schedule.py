"""The schedule of mla_decode's Hopper kernel: who attends which blocks of which rows."""

import functools

import jax
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.mla_decode.few_queries_kernel import MAX_QUERY_ROWS
from pallas_kernels.mla_decode.schedule import (
    _CUTS_COST,
    _LEAST_BLOCKS,
    _MERGE_COST,
    _ROW_COST,
    BLOCK,
    FEW_QUERIES,
    Schedule,
    schedule,
)
from tests.pallas_kernels.numerics import device

MAX_PAGES = 700
make = jax.jit(functools.partial(schedule, max_pages=MAX_PAGES), static_argnames="parts")


def blocks_of(lengths):
    return np.clip(-(-np.asarray(lengths) // BLOCK), 1, MAX_PAGES)


def segments(made: Schedule):
    """(part, row, first block, end block) of all that is attended, in order."""
    parts, table = made.parts, np.asarray(made.table)
    found = []
    for part, (first_row, last_row, begin, end) in enumerate(table[:parts].tolist()):
        for row in range(first_row, last_row + 1):
            first = begin if row == first_row else 0
            found.append((part, row, first, end if row == last_row else table[parts + row, 0]))
    return found


def check_schedule(lengths, parts):
    """All that the kernels rely on; returns the segments."""
    made = make(device(lengths, "int32"), parts=parts)
    table, split = np.asarray(made.table), np.asarray(made.split)
    B = len(lengths)
    assert table.shape == (parts + B, 4)
    assert split.shape == (parts, 4)
    assert table.dtype == split.dtype == np.int32
    rows, want_blocks = table[parts:], blocks_of(lengths)
    np.testing.assert_array_equal(rows[:, 0], want_blocks)
    np.testing.assert_array_equal(rows[:, 3], lengths)

    found = segments(made)
    covered = [(row, block) for _, row, a, b in found for block in range(a, b)]
    assert covered == [(row, block) for row in range(B) for block in range(want_blocks[row])]
    assert all(a < b for _, _, a, b in found)

    holders = [[part for part, r, _, _ in found if r == row] for row in range(B)]
    for row, of_row in enumerate(holders):
        assert of_row == list(range(of_row[0], of_row[0] + len(of_row))), f"row {row}"
    assert rows[:, 1].tolist() == [len(of_row) for of_row in holders]

    numbers = [
        rows[row, 2] + part for row in range(B) if len(holders[row]) > 1 for part in holders[row]
    ]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) <= 2 * parts

    several = [row for row in range(B) if len(holders[row]) > 1]
    want = [[row, rows[row, 2] + holders[row][0], len(holders[row])] for row in several]
    assert split[: len(several), :3].tolist() == want
    assert (split[len(several) :, 2] == 0).all()
    assert (split[:, 3] == len(several)).all()

    cost = np.zeros(parts, int)
    for part, _, a, b in found:
        cost[part] += b - a + _ROW_COST
    share = max(-(-(want_blocks + _ROW_COST).sum() // parts), _LEAST_BLOCKS)
    # A piece that begins in a row's middle pays for the row again.
    assert cost.max() <= share + max(_MERGE_COST + _CUTS_COST, _ROW_COST)
    return found


def adversarial(B, parts):
    """Lengths that stand at or about the borders of blocks, of shares and of the table."""
    longest = MAX_PAGES * BLOCK
    yield np.zeros(B, int)
    yield np.full(B, 1)
    for length in (BLOCK - 1, BLOCK, BLOCK + 1, longest, longest + 3):
        yield np.full(B, length)
    for place in (0, B // 2, B - 1):
        one = np.zeros(B, int)
        one[place] = longest
        yield one
        yield longest - one
    yield np.arange(B) * BLOCK
    yield np.arange(B)[::-1] * BLOCK + 1
    yield np.where(np.arange(B) % 2, 0, longest)
    # Rows whose costs end at a share's border, and one block before and behind it.
    for more in (-1, 0, 1):
        yield np.full(B, (max(parts // B, 1) * 8 - _ROW_COST + more) * BLOCK)


# One compilation each: fewer rows than parts, as many, more; one of either.
SHAPES = [(1, 1), (1, 7), (7, 1), (2, 132), (16, 16), (128, 66)]
MORE_SHAPES = [pytest.param(*s, marks=pytest.mark.slow) for s in [(3, 5), (64, 66), (300, 33)]]


@pytest.mark.parametrize(("B", "parts"), [*SHAPES, *MORE_SHAPES])
def test_every_block_once(B, parts):
    for lengths in adversarial(B, parts):
        check_schedule(lengths, parts)
    rng = np.random.default_rng(B)
    for longest in (100, 1000, MAX_PAGES * BLOCK + 100):
        for _ in range(4):
            check_schedule(rng.integers(0, longest, B), parts)
            check_schedule((longest ** rng.random(B)).astype(int), parts)


def test_whole_rows_stay_whole_where_that_ends_no_later():
    """128 equal rows: two for each of 64 parts, and two parts without work."""
    found = check_schedule(np.full(128, 4096), 66)
    assert [row for _, row, _, _ in found] == list(range(128))
    assert np.bincount([part for part, *_ in found], minlength=66).tolist() == [2] * 64 + [0] * 2


def test_few_long_rows_are_cut():
    """One row over 132 parts: its 700 blocks by sixes; 9 by fours."""
    for blocks, want in ((MAX_PAGES, [6] * 116 + [4]), (9, [4, 4, 1])):
        found = check_schedule(np.array([blocks * BLOCK]), 132)
        assert [b - a for _, _, a, b in found] == want


def test_whole_rows_where_merging_costs_more_than_it_saves():
    """Four rows for each of 32 parts of 33, eight blocks over the even share; not when they are
    twice as long."""
    for length, cut in ((4096, False), (8192, True)):
        found = check_schedule(np.full(128, length), 33)
        assert (len(found) > 128) == cut


@pytest.mark.parametrize(("queries", "heads", "tiles"), [(1, 8, 1), (1, 128, 2), (2, 72, 3)])
def test_public_schedule_fills_the_device(queries, heads, tiles):
    lengths = device([100, 5000], "int32")
    public = functools.partial(
        pallas_kernels.mla_decode_schedule, queries=queries, heads=heads, max_pages=100
    )
    made = jax.jit(public)(lengths)
    assert made.parts == multiprocessors() // tiles
    costs = FEW_QUERIES if queries * heads <= MAX_QUERY_ROWS else None
    own = functools.partial(schedule, max_pages=100, parts=made.parts, costs=costs)
    want = jax.jit(own)(lengths)
    np.testing.assert_array_equal(made.table, want.table)
    np.testing.assert_array_equal(made.split, want.split)
