"""sparse_index on Hopper GPUs: keys of 128 columns in pages of 64 tokens, bfloat16 or float8.

The kernel has persistent CTAs of a producer warp and two consumer warpgroups.

The matmul is transposed, S^T = K Q^T: the M dimension of wgmma (64) is the tokens of a page, and
its columns are the heads of a group of queries. So the sum over heads is one over the columns of a
row.

A CTA takes units one after the other (:mod:`units`). A unit is a range of pages of a sequence,
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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float, Float32, Int, Int32, UInt8

from pallas_kernels.hopper import multiprocessors, require_hopper, wgmma
from pallas_kernels.hopper.barriers import TmaCopy
from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    array,
    asm,
    asm_numbers,
    const,
    i32,
    i64,
    inline,
    item,
    scalar,
    shared_address,
    value_of,
    warp_and_lane,
    warp_prefix_sum,
    wgmma_row,
)
from pallas_kernels.hopper.launch import LANE, grid_kernel, overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.ring import PipelineState, Ring
from pallas_kernels.hopper.tiles import (
    ACC,
    COLUMN,
    ROW,
    ROWS,
    WGMMA,
    load_with_layout,
    spread_columns,
    tiles_of,
    two_views,
)
from pallas_kernels.hopper.warpgroup import WARPS, first_warp, when
from pallas_kernels.sparse_index import units
from pallas_kernels.sparse_index.scaled_pages import KEY_DTYPE, SCALE_BYTES, scale_rows
from pallas_kernels.sparse_index.units import PAGE, ROW_COST, Lanes, Unit

COLUMNS = 128
SCALED_ROWS = PAGE + scale_rows(PAGE, COLUMNS)
_STAGE_ROWS = -(-SCALED_ROWS // 8) * 8  # a stage begins at a multiple of 1,024 bytes
CONSUMERS = 2
_MOST_COLUMNS = 128  # of a matmul, if a group has several: 64 registers per thread
_REGISTERS = 232, 40  # per thread of consumers and producer
_INTERPRETED_CTAS = 2
_MOST_ROWS = 256  # heads of all queries of a group
# The numbers are those of units of one group and of two. With few queries the CTAs read at the
# memory's bandwidth, and more pages in flight make it slower.
_MOST_STAGES = {1: 12, CONSUMERS: 22}
_SHARED_BYTES = 232448 - 8 * 1024  # of a CTA, less barriers
_MOST_PAGES = 32  # of a unit
_UNTILED = plgpu.RefType((plgpu.SwizzleTransform(128),))


def sparse_index(
    q: Float[Array, "B T J D"],
    weights: Float32[Array, "B T J"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P rows width"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    page_size: int | None = None,
    interpret: Any = None,
) -> Float32[Array, "B T S"]:
    """Implements :func:`pallas_kernels.sparse_index`. It has no gradient.

    The tensor cores sum products of float8 with fewer bits than float32 has, about 13.
    """
    require_hopper(interpret)
    B, T, J, D = q.shape
    of_pages = {jnp.dtype(jnp.bfloat16): jnp.bfloat16, jnp.dtype(KEY_DTYPE): jnp.uint8}
    if pages.dtype != of_pages.get(q.dtype):
        raise NotImplementedError(
            "takes queries and pages of bfloat16, or queries of float8_e4m3fn and pages of uint8,"
            f" got {q.dtype} and {pages.dtype}"
        )
    if (shape := (page_size or pages.shape[1], D)) != (PAGE, COLUMNS):
        raise NotImplementedError(
            f"takes pages of {PAGE} tokens and keys of {COLUMNS} columns, got {shape}"
        )
    if page_size is not None and pages.shape[1] < SCALED_ROWS:
        raise NotImplementedError(
            f"takes {SCALED_ROWS} rows of keys and scales, got {pages.shape[1]}"
        )
    if J % 8 or not 0 < J <= 256:
        raise NotImplementedError(f"takes 8 to 256 heads in multiples of 8, got {J}")
    if 0 in (B, T, *pages.shape, *block_tables.shape):
        raise NotImplementedError(f"takes no empty arrays, got pages {pages.shape}")
    if (row := pages.shape[2] * pages.dtype.itemsize) % 128:
        raise NotImplementedError(f"takes tokens of a multiple of 128 bytes, got {row}")
    config = plan(B, T, J, block_tables.shape[1], q.dtype.itemsize)
    tokens = B * -(-T // config.queries) * (block_tables.shape[1] + 1) * PAGE
    if config.pages is None and tokens >= 2**30:
        raise NotImplementedError(
            f"equal shares: takes fewer than 2^30 tokens in all, got {tokens}"
        )
    # Groups of queries are scored together. Pad to whole groups.
    padded = -T % (config.queries * config.groups)
    q = jnp.pad(q, ((0, 0), (0, padded), (0, 0), (0, 0)))
    weights = jnp.pad(weights, ((0, 0), (0, padded), (0, 0)))
    return score(
        q.reshape(B, -1, config.queries * J, D),
        weights.reshape(B, -1, config.queries, J),
        pages,
        block_tables.astype(jnp.int32),
        lengths.astype(jnp.int32),
        queries=T,
        config=config,
        interpret=interpret,
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning parameters that do not change any result."""

    queries: int  # queries of a group
    pages: int | None  # Pages of a unit. None divides all pages into equal shares, see units.
    groups: int  # groups of a unit: 1, or 2 for one of each consumer
    stages: int  # pages in the ring buffer, an even number

    @property
    def unroll(self) -> int:
        """Pages that a consumer takes per iteration, to overlap the sums of one with the matmul of
        the next."""
        return 1 if self.groups > 1 else 2


def plan(B: int, T: int, J: int, max_pages: int, itemsize: int) -> Config:
    """Returns the parameters for T queries of J heads in each of B sequences, and keys of numbers
    of ``itemsize`` bytes."""
    most = max(1, _MOST_ROWS // J)
    # Two groups of bfloat16 queries do not fit in shared memory.
    groups = 1 if most >= T or itemsize > 1 else CONSUMERS
    sets = -(-T // (most * groups))
    queries = -(-T // (sets * groups))
    of_queries = 2 * groups * queries * J * (COLUMNS * itemsize + 4)
    of_stage = (_STAGE_ROWS if itemsize == 1 else PAGE) * COLUMNS * itemsize
    room = (_SHARED_BYTES - of_queries) // of_stage

    def cost(pages: int) -> int:
        """Returns the time of the busiest CTA."""
        count = B * sets * -(-max_pages // pages)
        return -(-count // multiprocessors()) * (pages + ROW_COST)

    pages = None
    if groups == 1:
        pages = min(range(min(_MOST_PAGES, max_pages), 0, -1), key=cost)
    stages = min(room, _MOST_STAGES[groups]) // 2 * 2
    return Config(queries, pages, groups, stages)


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
    """Scores the tokens of each table for G groups of Tg queries. The last groups of T ``queries``
    may have fewer than the others."""
    B, G, rows, _ = q.shape
    J, float8, on_gpu = weights.shape[-1], q.dtype == KEY_DTYPE, interpret is None
    max_pages, groups, stages = block_tables.shape[1], config.groups, config.stages
    work = units.Work(B, G // groups, groups, config.queries, queries, max_pages)
    ctas = multiprocessors() if on_gpu else _INTERPRETED_CTAS
    if config.pages is not None:
        ctas = min(ctas, B * work.sets * -(-max_pages // config.pages))
    # A page is read by as many consumers as there are groups, and queries by both.
    key_barriers = Ring.scratch(stages, 1, groups, interpret)
    q_barriers = Ring.scratch(2, 2 * groups, CONSUMERS, interpret)

    def sparse_index(*refs: Any) -> None:
        arrays, barriers = _Arrays(*refs[: len(_Arrays._fields)]), refs[len(_Arrays._fields) :]
        if float8 and on_gpu:  # views of the same memory: copies and wgmma take the untiled one
            arrays = arrays._replace(q=arrays.q[1])
        key_ring = Ring.of(stages, groups, barriers[: len(key_barriers)], interpret)
        q_ring = Ring.of(2, CONSUMERS, barriers[len(key_barriers) :], interpret)
        q_ring.initialise(warps=WARPS * (CONSUMERS + 1))
        key_ring.initialise(warps=WARPS * (CONSUMERS + 1))
        overlap_preceding_kernel(interpret=interpret)
        cta, wg = lax.axis_index("cta"), lax.axis_index("wg")
        if config.pages is None:
            shares = cta, ctas, arrays.lengths_g, _warp_lanes(interpret)
            count, unit_of = units.equal_shares(work, *shares)
        else:
            count, unit_of = units.in_turn(work, config.pages, cta, ctas, arrays.lengths_g)
        state = arrays, key_ring, q_ring, work, config

        @when(wg == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            when(first_warp(on_gpu))(lambda: _produce(count, unit_of, *state))

        @when(wg != CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            _consume(count, unit_of, *state, wg, interpret)

    q_shape, keys = (2, groups, rows, COLUMNS), tiles_of(stages, PAGE, COLUMNS)
    if float8:
        swizzle = (plgpu.SwizzleTransform(COLUMNS),) if on_gpu else ()
        keys = plgpu.SMEM((stages, _STAGE_ROWS, COLUMNS), jnp.uint8, transforms=swizzle)
    return grid_kernel(
        sparse_index,
        jax.ShapeDtypeStruct((B, queries, max_pages * PAGE), jnp.float32),
        [
            two_views(q_shape, q.dtype, on_gpu=on_gpu) if float8 else tiles_of(*q_shape),
            plgpu.SMEM((2, groups, config.queries, J), jnp.float32),
            keys,
            *key_barriers,
            *q_barriers,
        ],
        warpgroups=CONSUMERS + 1,
        grid={"cta": ctas},
        interpret=interpret,
        lowering_semantics=LANE,
    )(q, weights, pages, block_tables, lengths)


class _Arrays(NamedTuple):
    """The kernel's arrays in global memory (_g) and in shared memory."""

    q_g: Any
    weights_g: Any
    pages_g: Any
    tables_g: Any
    lengths_g: Any
    out_g: Any
    q: Any  # queries [2, groups, rows, COLUMNS] of two units
    weights: Any  # heads' weights [2, groups, queries, J] of two units
    keys: Any  # Ring of pages [stages, rows, COLUMNS]. Rows after 64 float8 keys have their scales.


def _produce(
    count: Any, unit_of: Any, arrays: _Arrays, key_ring: Ring, q_ring: Ring, work: units.Work,
    config: Config,
) -> None:  # fmt: skip
    """Copies the queries and pages of the CTA's units, in one warp."""
    rows, J, float8 = arrays.q_g.shape[2], arrays.weights_g.shape[-1], _is_float8(arrays)
    page_rows = SCALED_ROWS if float8 else PAGE

    def page_number(unit: Unit, k: jax.Array) -> jax.Array:
        # Table entries past a sequence's length may be anything; clip them to the page pool.
        k = jnp.minimum(unit.first + k, work.max_pages - 1)
        return jnp.clip(arrays.tables_g[unit.sequence, k], 0, arrays.pages_g.shape[0] - 1)

    def copy_unit(i: jax.Array, carry: Any) -> Any:
        state, loaded = carry
        unit = unit_of(i)
        first = page_number(unit, jnp.int32(0))  # it arrives while queries are copied

        @when(unit.seen > 0)
        def _() -> None:
            copies = []
            for n in range(config.groups):
                group, buffer = (unit.sequence, unit.group + n), (loaded & 1, n)
                tile = (*group, pl.ds(0, rows), pl.ds(0, COLUMNS))
                copies.append(TmaCopy(arrays.q_g, tile, arrays.q.at[buffer], tiled=not float8))
                weights = arrays.weights_g, (*group, pl.ds(0, config.queries), pl.ds(0, J))
                target = arrays.weights.at[buffer]
                copies.append(TmaCopy(*weights, target, tiled=False, swizzle=None, contiguous=True))
            q_ring.fill(_q_state(loaded), copies)

        def copy_page(k: jax.Array, carry: Any) -> Any:
            state, number = carry
            page = number, pl.ds(0, page_rows), pl.ds(0, COLUMNS)
            stage = arrays.keys.at[state.stage]
            if float8:
                stage = stage.at[pl.ds(0, page_rows)]
            key_ring.fill(state, [TmaCopy(arrays.pages_g, page, stage, tiled=not float8)])
            # The next number is loaded while the ring is full.
            return key_ring.next(state), page_number(unit, k + 1)

        state, _ = lax.fori_loop(0, unit.seen, copy_page, (state, first))
        return state, loaded + jnp.where(unit.seen > 0, 1, 0)

    state, loaded = lax.fori_loop(0, count, copy_unit, (key_ring.start(), jnp.int32(0)))
    key_ring.drain(state)
    q_ring.drain(_q_state(loaded))


def _consume(
    count: Any, unit_of: Any, arrays: _Arrays, key_ring: Ring, q_ring: Ring, work: units.Work,
    config: Config, wg: Any, interpret: Any,
) -> None:  # fmt: skip
    """Scores the pages of the CTA's units: all of them for one group, or every second page."""
    q_ring.release_all()
    if config.groups == CONSUMERS:
        key_ring.release_all()
    else:
        when(wg == 0)(key_ring.release_all)
    step = 1 if config.groups > 1 else CONSUMERS
    number = wg if config.groups > 1 else jnp.int32(0)
    row = plgpu.broadcasted_iota(jnp.int32, (PAGE,), 0, layout=ROW)
    hidden = plgpu.layout_cast(jnp.full((PAGE,), -jnp.inf, jnp.float32), ROW)
    asynchronous = _is_float8(arrays) and interpret is None
    settings = arrays, key_ring, work, config, step, interpret

    def score_unit(i: jax.Array, carry: Any) -> Any:
        pages_before, loaded = carry
        unit = _ConsumedUnit(unit_of(i), loaded & 1, number, row, hidden, *settings)
        seen = unit.pages.seen
        when(seen > 0)(lambda: q_ring.wait_full(_q_state(loaded)))
        unit.load_weights()
        # In turn over all units, so that a stage always belongs to the same consumer.
        skip, count = jnp.int32(0), seen
        if step > 1:
            skip = lax.rem(wg + step - lax.rem(pages_before, jnp.int32(step)), jnp.int32(step))
            count = lax.div(seen - skip + (step - 1), jnp.int32(step))
        state, done = _state(pages_before + skip, config.stages), jnp.int32(0)
        if asynchronous:
            unroll = config.unroll
            done = lax.div(count, jnp.int32(unroll))
            state = lax.fori_loop(
                0, done, lambda n, state: unit.score_pages(skip, n * unroll, unroll, state), state
            )

        def score_page(n: jax.Array, state: PipelineState) -> PipelineState:
            if asynchronous:
                return unit.score_pages(skip, n, 1, state)
            return unit.score_page(skip + n * step, state)

        lax.fori_loop(done * config.unroll, count, score_page, state)
        when(seen > 0)(lambda: q_ring.release(_q_state(loaded)))

        def hide_page(n: jax.Array, _: None) -> None:
            for t in range(config.queries):
                unit.store(seen + (n * step + wg if step > 1 else n), t, hidden)

        not_seen = unit.pages.in_table - seen
        if step > 1:
            not_seen = lax.div(not_seen - wg + (step - 1), jnp.int32(step))
        lax.fori_loop(0, not_seen, hide_page, None)
        return pages_before + seen, loaded + jnp.where(seen > 0, 1, 0)

    lax.fori_loop(0, count, score_unit, (jnp.int32(0), jnp.int32(0)))


class _ConsumedUnit:
    """A unit of pages, and the group of its queries that a consumer scores them for."""

    def __init__(
        self, pages: Unit, buffer: Any, number: Any, row: jax.Array, hidden: jax.Array,
        arrays: _Arrays, key_ring: Ring, work: units.Work, config: Config, step: int,
        interpret: Any,
    ) -> None:  # fmt: skip
        self.pages, self.buffer, self.number = pages, buffer, number
        self.row, self.hidden = row, hidden
        self.arrays, self.key_ring, self.config, self.step = arrays, key_ring, config, step
        self.queries, self.interpret, self.float8 = work.queries, interpret, _is_float8(arrays)
        self.heads = arrays.weights_g.shape[-1]
        most, queries = max(1, _MOST_COLUMNS // self.heads), config.queries
        self.parts = [(t, min(most, queries - t)) for t in range(0, queries, most)]
        """The first query and the number of queries of each matmul of the group."""
        self.group = pages.group + number
        self.weights: Any = arrays.weights.at[buffer, number]
        self.q_base: Any = None
        if self.float8 and interpret is None:
            rows = arrays.q_g.shape[2]
            offset = (buffer * config.groups + number) * rows * 128
            self.q_base = wgmma.operand_base(arrays.q, offset)

    def load_weights(self) -> None:
        """Loads the heads' weights to registers; with bfloat16, each page loads them instead."""
        if self.float8 and self.interpret is None:
            weights = (self.weights.at[t] for t in range(self.config.queries))
            self.weights = [load_with_layout(each, COLUMN) for each in weights]

    def score_page(self, k: jax.Array, state: PipelineState) -> PipelineState:
        """Scores page k, one part of the group after the other."""
        self.key_ring.wait_full(state)
        scale = self.scale_of(state)
        for part in range(len(self.parts)):
            scores = self.scores_of(k, part, self.multiply(part, state), scale)
            if part == len(self.parts) - 1:
                self.key_ring.release(state)
            self.store_part(k, part, scores)
        return self.after(state)

    def score_pages(
        self, skip: jax.Array, n: jax.Array, count: int, state: PipelineState
    ) -> PipelineState:
        """Scores ``count`` of this consumer's pages from its n-th on. While it sums one part of a
        page, the tensor cores multiply the next part or page."""
        parts, key_ring = self.parts, self.key_ring
        items = [(page, part) for page in range(count) for part in range(len(parts))]
        at_once = min(len(items), max(2, len(parts)))
        states = [state]
        for _ in range(count):
            states.append(self.after(states[-1]))
        running: dict[tuple[int, int], jax.Array] = {}

        def start(item: tuple[int, int], previous: jax.Array) -> None:
            page, part = item
            if part == 0:
                key_ring.wait_full(states[page])
            running[item] = self.start_product(part, states[page], previous)

        for page, part in items[:at_once]:
            zeros = jnp.zeros((ROWS, parts[part][1] * self.heads), jnp.float32)
            start((page, part), plgpu.layout_cast(zeros, WGMMA))
        for i, (page, part) in enumerate(items):
            later, k = min(at_once, len(items) - i) - 1, skip + (n + page) * self.step
            scale = self.scale_of(states[page])
            product = wgmma.wait_for_product(running[page, part], later=later)
            if part == len(parts) - 1:
                key_ring.release(states[page])
            self.store_part(k, part, self.scores_of(k, part, product, scale))
            if i + at_once < len(items):
                start(items[i + at_once], product)
        return states[-1]

    def after(self, state: PipelineState) -> PipelineState:
        """Returns the state of this consumer's next page."""
        for _ in range(self.step):
            state = self.key_ring.next(state)
        return state

    def start_product(self, part: int, state: PipelineState, previous: jax.Array) -> jax.Array:
        keys = wgmma.operand_base(self.arrays.keys, state.stage * (_STAGE_ROWS * COLUMNS))
        offset = self.parts[part][0] * self.heads * 128
        return wgmma.start_product(keys, self.q_base, 0, offset, previous)

    def multiply(self, part: int, state: PipelineState) -> jax.Array:
        """Returns the products of a page's keys and a part's queries, float32 [64, columns]."""
        first, width = (n * self.heads for n in self.parts[part])
        q, keys, where = self.arrays.q, self.arrays.keys, (self.buffer, self.number)
        if self.float8:  # interpreted
            keys = lax.bitcast_convert_type(keys[state.stage, :PAGE], KEY_DTYPE)
            columns = q[*where, first : first + width]
            return lax.dot(keys.astype(jnp.float32), columns.astype(jnp.float32).T)

        def run(accumulator: Any) -> jax.Array:
            b = q.at[*where, pl.ds(first, width)]
            plgpu.wgmma(accumulator, keys.at[state.stage], b.transpose((1, 0)))
            return accumulator[...]

        return pl.run_scoped(run, ACC((PAGE, width), jnp.float32))

    def scale_of(self, state: PipelineState) -> jax.Array | None:
        if not self.float8:
            return None
        return _key_scales(self.arrays.keys, state.stage, interpret=self.interpret)

    def scores_of(self, k: Any, part: int, product: jax.Array, scale: Any) -> list[jax.Array]:
        """Returns the scores of page k for a part's queries."""
        first, position = self.parts[part][0], self.row + (self.pages.first + k) * PAGE
        sums = _sum_heads(product, self.weights, first, self.heads, interpret=self.interpret)
        results = []
        for t, scores in enumerate(sums, first):
            scores = scores if scale is None else scores * scale
            visible = self.pages.length - self.queries + 1 + self.group * self.config.queries + t
            results.append(jnp.where(position < visible, scores, self.hidden))
        return results

    def store_part(self, k: Any, part: int, results: Sequence[jax.Array]) -> None:
        for t, scores in enumerate(results, self.parts[part][0]):
            self.store(k, t, scores)

    def store(self, k: jax.Array, t: int, scores: jax.Array) -> None:
        """Stores the scores of page k for the group's query t."""
        query = self.group * self.config.queries + t
        where = self.pages.sequence, query, (self.pages.first + k) * PAGE
        exists = query < self.queries
        _store_scores(self.arrays.out_g, where, scores, exists, interpret=self.interpret)


def _is_float8(arrays: _Arrays) -> bool:
    return arrays.q_g.dtype == KEY_DTYPE


def _state(n: jax.Array, stages: int) -> PipelineState:
    """Returns the state of a ring for its n-th fill."""
    return PipelineState(lax.rem(n, jnp.int32(stages)), lax.div(n, jnp.int32(stages)) & 1)


def _q_state(n: jax.Array) -> PipelineState:
    return PipelineState(n & 1, lax.shift_right_logical(n, jnp.int32(1)) & 1)


def _warp_lanes(interpret: Any) -> Lanes:
    """Returns the lanes of this thread's warp. All its threads must call their functions."""
    if interpret is not None:
        return Lanes(1, jnp.int32(0), *[lambda x: x] * 3)  # the interpreter has no warps
    number = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    def over_warp(text: str) -> Any:
        @inline(SCALAR, returns=number)
        def reduce(x: Any) -> Any:
            return scalar(asm(text, "=r,r", value_of(x), result=i32(), effects=True))

        return reduce

    @inline(returns=number)
    def index() -> Any:
        return scalar(warp_and_lane()[1])

    @inline(SCALAR, returns=number)
    def prefix_sum(x: Any) -> Any:
        return scalar(warp_prefix_sum(value_of(x)))

    sum_, max_ = (over_warp(f"redux.sync.{op}.s32 $0, $1, 0xffffffff;") for op in ("add", "max"))
    return Lanes(32, index(), sum_, max_, prefix_sum)


def _sum_heads(
    products: jax.Array, weights: Any, first: int, heads: int, *, interpret: Any
) -> Sequence[jax.Array]:
    """Returns the weighted sum of the ReLU of products, float32 [64, queries * heads], as float32
    [64] per query from the group's query ``first`` on. ``weights`` are [queries, heads] of the
    whole group in shared memory, or a list in registers."""
    count = products.shape[1] // heads
    if interpret is not None:
        sums = []
        for t in range(count):
            of_query = jnp.maximum(products[:, t * heads : (t + 1) * heads], 0.0)
            head_weights = plgpu.layout_cast(weights[first + t], COLUMN)
            sums.append((of_query * spread_columns(head_weights, ROWS)).sum(axis=1))
        return sums
    row = plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=ROW)
    in_registers = isinstance(weights, list)
    types = [COLUMN] * count if in_registers else [REF]

    @inline(WGMMA, types, returns=(row,) * count)
    def add(products: Any, weights: Any) -> Any:
        f32 = ir.F32Type.get()
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        numbers = [item(pair, i) for pair in products.registers.flat for i in range(2)]
        _, lane = warp_and_lane()
        of_thread = arith.shli(arith.andi(lane, const(3)), const(3))
        base: Any = None if in_registers else arith.addi(shared_address(weights[0]), of_thread)
        results = []
        for t in range(count):
            sums = [zero, zero]  # of the thread's two rows
            for eight in range(heads // 8):
                if in_registers:
                    pair = [item(weights[t].registers.flat[eight], i) for i in range(2)]
                else:
                    offset = 4 * ((first + t) * heads + 8 * eight)
                    text = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {offset}];"
                    pair = asm_numbers(text, "=f,=f,r,~{memory}", base, kind=f32, count=2)
                at = 4 * (t * heads // 8 + eight)
                for half in range(2):
                    for i in range(2):
                        x = arith.maximumf(numbers[at + 2 * half + i], zero)
                        sums[half] = llvm.intr_fma(x, pair[i], sums[half])
            for step in (1, 2):  # over the four threads of a row
                text = f"shfl.sync.bfly.b32 $0, $1, {step}, 0x1f, 0xffffffff;"
                others = [asm(text, "=f,f", x, result=f32, effects=True) for x in sums]
                sums = [arith.addf(x, other) for x, other in zip(sums, others, strict=True)]
            one = ir.VectorType.get((1,), f32)
            results.append(array([vector.broadcast(one, x) for x in sums], (ROWS,), ROW))
        return tuple(results)

    return add(products, weights[first : first + count] if in_registers else [weights])


def _key_scales(stages: Any, stage: Any, *, interpret: Any) -> jax.Array:
    """Returns the scales of a page's keys, float32 [64] with one per token. They follow the 64 keys
    in ``stages``, uint8 [stages, rows, 128] in shared memory."""
    if interpret is not None:
        scales = stages[stage, ROWS : ROWS + scale_rows(ROWS, stages.shape[2])]
        scales = jax.lax.bitcast_convert_type(scales.reshape(ROWS, SCALE_BYTES), jnp.float32)
        return plgpu.layout_cast(scales, ROW)

    @inline(_UNTILED, SCALAR, returns=plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=ROW))
    def load(stages: Any, stage: Any) -> Any:
        _, rows, columns = ir.MemRefType(stages.type).shape
        begin = arith.addi(arith.muli(value_of(stage), const(rows)), const(ROWS))
        begin = arith.addi(shared_address(stages), arith.muli(begin, const(columns)))
        # Row i of the page is swizzled: its 16 bytes number j are at number j ^ (i % 8). The scales
        # of 32 tokens are in row 64, those of the others in row 65.
        row = wgmma_row()
        second = arith.shrui(row, const(5))
        at = arith.xori(arith.shli(row, const(2)), arith.shli(second, const(4)))
        address = arith.addi(begin, at)
        registers = []
        for half in range(2):  # eight tokens later, in the same row
            text = f"ld.shared.f32 $0, [$1 + {32 * half}];"
            f32 = ir.F32Type.get()
            x = asm(text, "=f,r,~{memory}", address, result=f32, effects=True)
            registers.append(vector.broadcast(ir.VectorType.get((1,), f32), x))
        return array(registers, (ROWS,), ROW)

    return load(stages, jnp.asarray(stage, jnp.int32))


def _store_scores(
    out: Any, where: tuple[Any, Any, Any], scores: jax.Array, exists: jax.Array, *, interpret: Any
) -> None:
    """Sets ``out[b, t, s : s + 64] = scores`` in global memory, if ``exists``. ``where`` is b, t
    and s."""
    if interpret is not None:

        @when(exists)
        def _() -> None:
            b, t, s = where
            out[b, t, pl.ds(s, ROWS)] = scores

        return

    @inline(REF, SCALAR, SCALAR, SCALAR, SCALAR, ROW)
    def store(out: Any, b: Any, t: Any, s: Any, exists: Any, scores: Any) -> None:
        _, queries, columns = ir.MemRefType(out.type).shape
        _, lane = warp_and_lane()
        query = arith.addi(arith.muli(value_of(b), const(queries)), value_of(t))
        column = arith.addi(value_of(s), wgmma_row())
        columns, two = (const(n, 64) for n in (columns, 2))
        wide = arith.muli(arith.extui(i64(), query), columns)
        at = arith.shli(arith.addi(wide, arith.extui(i64(), column)), two)
        address = arith.addi(llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(out)), at)
        is_first = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, const(3)), const(0))
        stores = arith.andi(
            is_first, arith.cmpi(arith.CmpIPredicate.ne, value_of(exists), const(0))
        )
        for half, register in enumerate(scores.registers.flat):
            text = f"@$2 st.global.f32 [$0 + {32 * half}], $1;"
            asm(text, "l,f,b,~{memory}", address, item(register, 0), stores, effects=True)

    b, t, s = (jnp.asarray(x, jnp.int32) for x in where)
    store(out, b, t, s, jnp.where(exists, 1, 0), scores)
