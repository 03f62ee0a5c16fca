"""The Hopper kernel of sparse_index: persistent programs of a producer warp and two consumers.

The matmul is transposed, S^T = K Q^T: the M dimension of wgmma (64) is the tokens of a page, and
its columns are the heads of a group of queries. So the sum over heads is one over the columns of a
row.

A program takes units one after the other (:mod:`units`). A unit is a range of pages of a sequence,
and one group of queries or two. The producer copies the unit's queries and pages by TMA, several
pages ahead and across units, so that the memory never waits for the start of a unit. With two
groups, both consumers take every page, each for its own group. With one group, which is for few
queries, the consumers take pages in turn. A page of float8 keys ends with their scales, so one copy
brings both to a stage of the ring. The hardware swizzles the scales like the keys.

A group of more than 128 rows takes several matmuls per page. While the tensor cores work on one,
the consumer takes the ReLU and the weighted sum of the one before. Pages that no query of a unit
sees are not read; their scores are -inf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, UInt8

from pallas_kernels.hopper import multiprocessors, wgmma
from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.copies import TmaCopy
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.ring import PipelineState, Ring
from pallas_kernels.hopper.tiles import ACC, ROW, ROWS, WGMMA, tiles_of, two_views
from pallas_kernels.hopper.warpgroup import WARPS, first_warp
from pallas_kernels.sparse_index import units
from pallas_kernels.sparse_index.registers import (
    head_weights,
    key_scales,
    store_scores,
    sum_heads,
    warp_lanes,
)
from pallas_kernels.sparse_index.scaled_pages import KEY_DTYPE, scale_rows
from pallas_kernels.sparse_index.units import PAGE, ROW_COST, Unit

COLUMNS = 128
SCALED_ROWS = PAGE + scale_rows(PAGE, COLUMNS)
_STAGE_ROWS = -(-SCALED_ROWS // 8) * 8  # a stage begins at a multiple of 1,024 bytes
CONSUMERS = 2
_MOST_COLUMNS = 128  # of a matmul, if a group has several: 64 registers per thread
_REGISTERS = 232, 40  # per thread of consumers and producer
_INTERPRETED_PROGRAMS = 2
_MOST_ROWS = 256  # heads of all queries of a group
# The numbers are those of units of one group and of two. With few queries the programs read at the
# memory's bandwidth, and more pages in flight make it slower.
_MOST_STAGES = {1: 12, CONSUMERS: 22}
_SHARED_BYTES = 232448 - 8 * 1024  # of a program, less barriers
_MOST_PAGES = 32  # of a unit


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning parameters that do not change any result."""

    queries: int
    """Queries of a group."""

    pages: int | None
    """Pages of a unit. None divides all pages into equal shares, see :mod:`units`."""

    groups: int
    """Groups of a unit: 1, or 2 for one of each consumer."""

    stages: int
    """Pages in the ring buffer, an even number."""

    unroll: int
    """Pages that a consumer takes per iteration. It overlaps the sums of one with the matmul of
    the next."""

    keep_weights: bool = False
    """Whether the heads' weights stay in registers for a unit's pages. Otherwise each page loads
    them from shared memory."""


def plan(B: int, T: int, J: int, max_pages: int, itemsize: int) -> Config:
    """Returns the parameters for T queries of J heads in each of B sequences.

    Args:
      itemsize: bytes of a number of the keys.
    """
    most = max(1, _MOST_ROWS // J)
    # Two groups of bfloat16 queries do not fit in shared memory.
    groups = 1 if most >= T or itemsize > 1 else CONSUMERS
    sets = -(-T // (most * groups))
    queries = -(-T // (sets * groups))
    of_queries = 2 * groups * queries * J * (COLUMNS * itemsize + 4)
    of_stage = (_STAGE_ROWS if itemsize == 1 else PAGE) * COLUMNS * itemsize
    room = (_SHARED_BYTES - of_queries) // of_stage

    def cost(pages: int) -> int:
        """Returns the time of the busiest program."""
        count = B * sets * -(-max_pages // pages)
        return -(-count // multiprocessors()) * (pages + ROW_COST)

    pages = None
    if groups == 1:
        pages = min(range(min(_MOST_PAGES, max_pages), 0, -1), key=cost)
    stages = min(room, _MOST_STAGES[groups]) // 2 * 2
    unroll = 1 if groups > 1 else 2
    return Config(queries, pages, groups, stages, unroll, keep_weights=itemsize == 1)


@lowered_once("queries", "config", "interpret")
def score(
    q: Float[Array, "B G rows D"],
    weights: Float32[Array, "B G Tg J"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page_rows width"],
    block_tables: Int32[Array, "B max_pages"],
    lengths: Int32[Array, " B"],
    *,
    queries: int,
    config: Config,
    interpret: Any = None,
) -> Float32[Array, "B T S"]:
    """Scores the tokens of each table for G groups of Tg queries.

    Args:
      queries: number of queries T. The last groups may have fewer than the others.
    """
    B, G, rows, _ = q.shape
    J, float8, on_gpu = weights.shape[-1], q.dtype == KEY_DTYPE, interpret is None
    # Table entries past a sequence's length may be anything; clip them to the page pool.
    last_page, max_pages = pages.shape[0] - 1, block_tables.shape[1]
    work = units.Work(B, G // config.groups, config.groups, config.queries, queries, max_pages)
    programs = multiprocessors() if on_gpu else _INTERPRETED_PROGRAMS
    if config.pages is not None:
        programs = min(programs, B * work.sets * -(-max_pages // config.pages))
    readers = config.groups  # of a page
    parts = _parts(config.queries, J)
    page_rows = SCALED_ROWS if float8 else PAGE
    rings = [(config.stages, 1, readers), (2, 2 * config.groups, CONSUMERS)]
    barriers = [Ring.scratch(*each, interpret) for each in rings]
    untiled = float8 and on_gpu

    def sparse_index(*refs: Any) -> None:
        q_g, weights_g, pages_g, tables_g, lengths_g, out_g, q_s, weights_s, keys_s, *ring_s = refs
        # Views of the same memory: copies and wgmma take the untiled one.
        q_s = q_s[1] if untiled else q_s
        key_ring = Ring.of(config.stages, readers, ring_s[: len(barriers[0])], interpret)
        q_ring = Ring.of(2, CONSUMERS, ring_s[len(barriers[0]) :], interpret)
        q_ring.initialise(warps=WARPS * (CONSUMERS + 1))
        key_ring.initialise(warps=WARPS * (CONSUMERS + 1))
        overlap_preceding_kernel(interpret=interpret)
        program, wg = lax.axis_index("program"), lax.axis_index("wg")
        of_program = program, programs, lengths_g
        if config.pages is None:
            count, unit_of = units.equal_shares(work, *of_program, warp_lanes(interpret))
        else:
            count, unit_of = units.in_turn(work, config.pages, *of_program)

        def produce() -> None:
            def number_of(unit: Unit, k: jax.Array) -> jax.Array:
                k = jnp.minimum(unit.first + k, max_pages - 1)
                return jnp.clip(tables_g[unit.sequence, k], 0, last_page)

            def copy_unit(i: jax.Array, carry: Any) -> Any:
                state, loaded = carry
                unit = unit_of(i)
                first = number_of(unit, jnp.int32(0))  # it arrives while queries are copied

                @when(unit.seen > 0)
                def _() -> None:
                    copies = []
                    for n in range(config.groups):
                        window = unit.sequence, unit.group + n
                        tile = (*window, pl.ds(0, rows), pl.ds(0, COLUMNS))
                        copies.append(_tiles_copy(q_g, tile, q_s.at[loaded & 1, n], float8))
                        whole = (*window, pl.ds(0, config.queries), pl.ds(0, J))
                        copies.append(_copy(weights_g, whole, weights_s.at[loaded & 1, n]))
                    q_ring.fill(_q_state(loaded), copies)

                def copy_page(k: jax.Array, carry: Any) -> Any:
                    state, number = carry
                    page = number, pl.ds(0, page_rows), pl.ds(0, COLUMNS)
                    stage = keys_s.at[state.stage]
                    if float8:
                        stage = stage.at[pl.ds(0, page_rows)]
                    key_ring.fill(state, [_tiles_copy(pages_g, page, stage, float8)])
                    # The next number is loaded while the ring is full.
                    return key_ring.next(state), number_of(unit, k + 1)

                state, _ = lax.fori_loop(0, unit.seen, copy_page, (state, first))
                return state, loaded + jnp.where(unit.seen > 0, 1, 0)

            state, loaded = lax.fori_loop(0, count, copy_unit, (key_ring.start(), jnp.int32(0)))
            key_ring.drain(state)
            q_ring.drain(_q_state(loaded))

        def consume() -> None:
            q_ring.release_all()
            if readers == CONSUMERS:
                key_ring.release_all()
            else:
                when(wg == 0)(key_ring.release_all)
            step = 1 if config.groups > 1 else CONSUMERS  # they share the pages, or the queries
            own = wg if config.groups > 1 else jnp.int32(0)
            row = plgpu.broadcasted_iota(jnp.int32, (PAGE,), 0, layout=ROW)
            hidden = plgpu.layout_cast(jnp.full((PAGE,), -jnp.inf, jnp.float32), ROW)

            def score_unit(i: jax.Array, carry: Any) -> Any:
                pages_before, loaded = carry
                unit, buffer = unit_of(i), loaded & 1
                group = unit.group + own
                weights_of_group: Any = weights_s.at[buffer, own]
                q_base: Any = None
                if untiled:
                    q_base = wgmma.operand_base(q_s, (buffer * config.groups + own) * rows * 128)
                when(unit.seen > 0)(lambda: q_ring.wait_full(_q_state(loaded)))
                if config.keep_weights and on_gpu:
                    weights_of_group = head_weights(weights_of_group, config.queries)

                def store(k: jax.Array, t: int, scores: jax.Array) -> None:
                    query = group * config.queries + t
                    where = unit.sequence, query, (unit.first + k) * PAGE
                    store_scores(out_g, where, scores, query < queries, interpret=interpret)

                def scale_of(state: PipelineState) -> jax.Array | None:
                    return key_scales(keys_s, state.stage, interpret=interpret) if float8 else None

                def scores_of(k: Any, part: int, product: jax.Array, scale: Any) -> list[jax.Array]:
                    """Returns the scores of a part's queries."""
                    first, position = parts[part][0], row + (unit.first + k) * PAGE
                    sums = sum_heads(product, weights_of_group, first, J, interpret=interpret)
                    results = []
                    for t, scores in enumerate(sums, first):
                        scores = scores if scale is None else scores * scale
                        visible = unit.length - queries + 1 + group * config.queries + t
                        results.append(jnp.where(position < visible, scores, hidden))
                    return results

                def store_all(k: Any, part: int, results: Sequence[jax.Array]) -> None:
                    for t, scores in enumerate(results, parts[part][0]):
                        store(k, t, scores)

                def start(part: int, state: PipelineState, previous: jax.Array) -> jax.Array:
                    keys = wgmma.operand_base(keys_s, state.stage * (_STAGE_ROWS * COLUMNS))
                    offset = parts[part][0] * J * 128
                    return wgmma.start_product(keys, q_base, 0, offset, previous)

                def multiply(part: int, state: PipelineState) -> jax.Array:
                    first, width = (n * J for n in parts[part])
                    if float8:  # interpreted
                        keys = lax.bitcast_convert_type(keys_s[state.stage, :PAGE], KEY_DTYPE)
                        columns = q_s[buffer, own, first : first + width]
                        f32 = jnp.float32
                        return lax.dot(keys.astype(f32), columns.astype(f32).T)

                    def run(accumulator: Any) -> jax.Array:
                        b = q_s.at[buffer, own, pl.ds(first, width)]
                        plgpu.wgmma(accumulator, keys_s.at[state.stage], b.transpose((1, 0)))
                        return accumulator[...]

                    return pl.run_scoped(run, ACC((PAGE, width), jnp.float32))

                def score_page(n: jax.Array, state: PipelineState) -> PipelineState:
                    k = skip + n * step
                    key_ring.wait_full(state)
                    scale = scale_of(state)
                    for part in range(len(parts)):
                        results = scores_of(k, part, multiply(part, state), scale)
                        if part == len(parts) - 1:
                            key_ring.release(state)
                        store_all(k, part, results)
                    return after(state)

                def after(state: PipelineState) -> PipelineState:
                    for _ in range(step):
                        state = key_ring.next(state)
                    return state

                def score_pages(n: jax.Array, count: int, state: PipelineState) -> PipelineState:
                    """Scores ``count`` pages. While the consumer sums one part of a page, the
                    tensor cores multiply the next part or the next page."""
                    items = [(page, part) for page in range(count) for part in range(len(parts))]
                    at_once = min(len(items), max(2, len(parts)))
                    states = [state]
                    for _ in range(count):
                        states.append(after(states[-1]))
                    running: dict[tuple[int, int], jax.Array] = {}

                    def run(item: tuple[int, int], previous: jax.Array) -> None:
                        page, part = item
                        if part == 0:
                            key_ring.wait_full(states[page])
                        running[item] = start(part, states[page], previous)

                    for page, part in items[:at_once]:
                        run((page, part), _zeros(parts[part][1] * J))
                    for i, (page, part) in enumerate(items):
                        later, k = min(at_once, len(items) - i) - 1, skip + (n + page) * step
                        scale = scale_of(states[page])
                        product = wgmma.wait_for_product(running[page, part], later=later)
                        if part == len(parts) - 1:
                            key_ring.release(states[page])
                        store_all(k, part, scores_of(k, part, product, scale))
                        if i + at_once < len(items):
                            run(items[i + at_once], product)
                    return states[-1]

                # In turn over all units, so that a stage always belongs to the same consumer.
                skip, own_pages = jnp.int32(0), unit.seen
                if step > 1:
                    skip = lax.rem(
                        wg + step - lax.rem(pages_before, jnp.int32(step)), jnp.int32(step)
                    )
                    own_pages = lax.div(unit.seen - skip + (step - 1), jnp.int32(step))
                state, whole = _state(pages_before + skip, config.stages), jnp.int32(0)
                one_page: Any = score_page
                if untiled:
                    whole = lax.div(own_pages, jnp.int32(config.unroll))
                    state = lax.fori_loop(
                        0,
                        whole,
                        lambda n, state: score_pages(n * config.unroll, config.unroll, state),
                        state,
                    )
                    one_page = lambda n, state: score_pages(n, 1, state)  # noqa: E731
                lax.fori_loop(whole * config.unroll, own_pages, one_page, state)
                when(unit.seen > 0)(lambda: q_ring.release(_q_state(loaded)))

                def hide_page(n: jax.Array, _: None) -> None:
                    for t in range(config.queries):
                        store(unit.seen + (n * step + wg if step > 1 else n), t, hidden)

                nothing_seen = unit.in_table - unit.seen
                if step > 1:
                    nothing_seen = lax.div(nothing_seen - wg + (step - 1), jnp.int32(step))
                lax.fori_loop(0, nothing_seen, hide_page, None)
                return pages_before + unit.seen, loaded + jnp.where(unit.seen > 0, 1, 0)

            lax.fori_loop(0, count, score_unit, (jnp.int32(0), jnp.int32(0)))

        @when(wg == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            when(first_warp(on_gpu))(produce)

        @when(wg != CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            consume()

    q_shape, keys = (2, config.groups, rows, COLUMNS), tiles_of(config.stages, PAGE, COLUMNS)
    if float8:
        swizzle = (plgpu.SwizzleTransform(COLUMNS),) if on_gpu else ()
        keys = plgpu.SMEM((config.stages, _STAGE_ROWS, COLUMNS), jnp.uint8, transforms=swizzle)
    return plgpu.kernel(
        sparse_index,
        out_type=jax.ShapeDtypeStruct((B, queries, max_pages * PAGE), jnp.float32),
        scratch_types=[
            two_views(q_shape, q.dtype, on_gpu=on_gpu) if float8 else tiles_of(*q_shape),
            plgpu.SMEM((2, config.groups, config.queries, J), jnp.float32),
            keys,
            *barriers[0],
            *barriers[1],
        ],
        grid=(programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(q, weights, pages, block_tables, lengths)


def _parts(queries: int, heads: int) -> Sequence[tuple[int, int]]:
    """Returns the first query and the number of queries of each matmul of a group."""
    most = max(1, _MOST_COLUMNS // heads)
    return [(first, min(most, queries - first)) for first in range(0, queries, most)]


def _zeros(columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), WGMMA)


def _state(n: jax.Array, stages: int) -> PipelineState:
    """Returns the state of a ring for its n-th fill."""
    return PipelineState(lax.rem(n, jnp.int32(stages)), lax.div(n, jnp.int32(stages)) & 1)


def _q_state(n: jax.Array) -> PipelineState:
    return PipelineState(n & 1, lax.shift_right_logical(n, jnp.int32(1)) & 1)


def _tiles_copy(source: Any, window: tuple[Any, ...], target: Any, float8: bool) -> TmaCopy:
    return TmaCopy(source, window, target, tiled=not float8)


def _copy(source: Any, window: tuple[Any, ...], target: Any) -> TmaCopy:
    return TmaCopy(source, window, target, tiled=False, swizzle=None, contiguous=True)
