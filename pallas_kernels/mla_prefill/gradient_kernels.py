"""The two kernels of mla_prefill's gradient on Hopper GPUs (bfloat16).

With ``delta = rowsum(out * d_out) - d_lse``, and sums over the visible pairs (see :mod:`blocked`)::

    p = exp(scale * q k^T - lse),  d_s = p * (d_out v^T - delta)
    of keys:     d_v = p^T d_out,  d_k = scale * d_s^T q
    of queries:                    d_q = scale * d_s k

The first kernel sums d_v and d_k, and stores d_s. The second one, a matmul of only the visible
pairs, sums d_q: five matmuls in all. Every result is summed in registers, in one order, so equal
calls give equal bits.

d_s, with two bytes per visible pair, is an array of *cells*, 64 keys by 64 queries, which
:class:`tiles.Cells` puts in order. Keys are rows of a cell, as they are in the registers of the
first kernel; wgmma of the second one reads them by columns.

In both kernels a producer warp takes tiles of one head from a queue, the longest first, as the
forward kernel does, and streams blocks through a ring of stages by TMA to two consumer warpgroups.

* Of keys, a tile is 128 keys: k and v stay in shared memory, and blocks are 64 queries of q and
  d_out. A warpgroup has 64 keys. For every block it computes the transposed scores ``k q^T`` and
  d_P; then P, whose registers are the left operand of ``d_v += P d_out``; then d_S, likewise of
  ``d_k += d_S q``. d_S leaves through shared memory meanwhile. Blocks that need a mask come first,
  and a warpgroup skips those that none of its keys is visible to.
* Of queries, a tile is 256 queries, and blocks are 64 keys and four cells. A warpgroup has 128
  queries. It skips cells that the first kernel has skipped, which are undefined.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import multiprocessors, wgmma
from pallas_kernels.hopper.barriers import TmaCopy
from pallas_kernels.hopper.ir import (
    INT32,
    SCALAR,
    Registers,
    asm,
    i32,
    inline,
    scalar,
    value_of,
)
from pallas_kernels.hopper.launch import LANE, grid_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.online_softmax import LOG2E
from pallas_kernels.hopper.registers import store_swizzled, widened
from pallas_kernels.hopper.ring import PipelineState, Ring
from pallas_kernels.hopper.tiles import (
    COLUMN,
    ROW,
    ROWS,
    WGMMA,
    load_with_layout,
    spread_columns,
    two_views,
)
from pallas_kernels.hopper.warpgroup import first_warp, when
from pallas_kernels.mla_prefill.tiles import (
    Cells,
    HeadTiles,
    claim_tile,
    mask_thread_columns,
    thread_bounds,
)

CONSUMERS = 2  # warpgroups
TILE = CONSUMERS * ROWS
PANEL = 64  # columns: a panel has rows of 128 bytes, the width of a swizzle atom
BLOCK = 64  # queries or keys of a block
L2_BYTES = 24 << 20  # share of the L2 cache for the streamed operands of concurrent heads
_ROW_BYTES = 128
CELL_BYTES = BLOCK * _ROW_BYTES
_STEP = 16  # queries: the K of a wgmma instruction
_QUEUE_SLOTS = 2
_STAGES = 3  # More do not fit in shared memory with keys 192 wide.
_PARTS = 2  # blocks of queries that a warpgroup has in the kernel of queries
# Registers per thread. Three warpgroups have 504 together, and 2 x 240 + 24 = 504.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24


# ---- tiles ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """The tiles of a kernel, and their blocks."""

    of_keys: bool  # or of queries
    order: HeadTiles  # of some sequences and heads
    tiles: int  # of all of those
    queries: int  # of a sequence
    keys: int
    K: int
    V: int
    ctas: int
    scale: float
    cells: Cells
    interpreted: bool

    @classmethod
    def of(
        cls, q: jax.Array, k: jax.Array, v: jax.Array, T: int, S: int, sequences: int, heads: int,
        scale: float, cells: Cells, interpreted: bool, *, of_keys: bool,
    ) -> Plan:  # fmt: skip
        K, V = q.shape[-1], v.shape[-1]
        rows, head_bytes = (S, T * (K + V) * 2) if of_keys else (T, S * K * 2)
        per_head = pl.cdiv(rows, TILE if of_keys else TILE * _PARTS)
        order = HeadTiles.of(sequences, heads, per_head, head_bytes, L2_BYTES)
        tiles = sequences * heads * per_head
        ctas = min(multiprocessors(), tiles)
        return cls(of_keys, order, tiles, T, S, K, V, ctas, scale, cells, interpreted)

    @property
    def rows(self) -> int:
        """Rows of a warpgroup in a tile."""
        return ROWS if self.of_keys else ROWS * _PARTS

    @property
    def tile(self) -> int:
        return CONSUMERS * self.rows

    @property
    def widths(self) -> tuple[int, int]:
        return self.K, self.V

    @property
    def panels(self) -> int:
        """Panels of a pair of operands side by side, which are as many TMA copies."""
        return sum(self.widths) // PANEL

    @property
    def all_cells(self) -> int:
        """Cells of all heads. Three follow, so that four that begin in the array end in it."""
        heads = self.tiles // self.order.per_head
        return heads * self.cells.count + 3

    def position_of(self, tile: Any) -> tuple[Any, Any, Any]:
        """Returns the sequence, the head and the first row of a tile."""
        b, h, i = self.order.locate(tile)
        return b, h, (i if self.of_keys else self.order.per_head - 1 - i) * self.tile

    def cells_of(self, b: Any, h: Any, keys: Any) -> Any:
        """Returns the index that the cell of the first queries has for a block of keys."""
        return (b * self.order.heads + h) * self.cells.count + self.cells.first(keys)

    # ---- blocks of queries ----

    def blocks_of(self, row: Any, start: Any, length: Any) -> tuple[Any, Any]:
        """Returns the first block of a tile of keys, and the number of blocks, at least 1."""
        count = pl.cdiv(self.queries, BLOCK)
        first = jnp.minimum(_quotient(row - start, BLOCK), count - 1)
        first = jnp.where(row < length, first, count - 1)
        return first, count - first

    def hidden_of(self, row: Any, start: Any, first: Any, count: Any) -> Any:
        """Returns how many of a tile's blocks do not see any of a warpgroup's keys, which begin at
        ``row``. They are the first ones."""
        return jnp.clip(_quotient(row - start, BLOCK) - first, 0, count)

    def first_columns(self, row: Any, start: Any, length: Any, first: Any) -> jax.Array:
        """Returns the column, in the first block, of the first query that sees each key, in the ROW
        layout, from key ``row`` on."""
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + row
        return jnp.where(row < length, row - (start + first * BLOCK), 1 << 30)

    # ---- blocks of keys ----

    def seen_by(self, end: Any, start: Any, length: Any) -> Any:
        """Returns how many blocks of keys queries before ``end`` see."""
        visible = jnp.minimum(length, start + jnp.minimum(end, self.queries))
        return _quotient(visible + BLOCK - 1, BLOCK)


def _quotient(a: Any, b: int) -> Any:
    """Returns ``a // b``, or 0 if a is negative."""
    return lax.div(jnp.maximum(a, 0), jnp.int32(b))


# ---- launch and roles ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Memory:
    """References to everything that a kernel reads and writes, except barriers."""

    # in global memory
    starts: Any
    lengths: Any
    first: Any  # the first sequence and head; results have only those from them on
    k: Any
    results: tuple[Any, ...]  # d_k and d_v, or d_q
    d_s: Any  # cells, [cells * BLOCK, PANEL]
    # in shared memory
    next_tile: Any
    staging: Any  # tiled [CONSUMERS, ROWS, PANEL]: results on their way out
    staging_untiled: Any
    blocks: Any  # panels [stages, panels, BLOCK, PANEL] of q and d_out, or of k
    # of the kernel of queries: [stages, 4 * BLOCK, PANEL]
    cells: Any = None
    # of the kernel of keys
    q: Any = None
    v: Any = None
    d_out: Any = None
    lse: Any = None  # [B, H, T padded to blocks], in base 2
    delta: Any = None
    fixed: Any = None  # panels [panels, TILE, PANEL] of k and v
    statistics: Any = None  # lse and delta of queries, [stages, 2, BLOCK]

    def locate(self, plan: Plan, b: Any, h: Any) -> tuple[Any, Any]:
        """Returns the sequence and head among all, of those among the results'."""
        b0, h0 = (_uniform(self.first[i], not plan.interpreted) for i in range(2))
        return b + b0, h + h0


@lowered_once("plan", "interpret")
def launch(operands: dict[str, jax.Array], *, plan: Plan, interpret: Any) -> list[jax.Array]:
    """Returns d_k, d_v and d_s, or d_q, of padded operands."""
    on_gpu, sequences = interpret is None, plan.tiles // plan.order.per_head // plan.order.heads

    def panels(*shape: int) -> Any:
        swizzle = (plgpu.SwizzleTransform(_ROW_BYTES),)
        return plgpu.SMEM((*shape, PANEL), jnp.bfloat16, transforms=swizzle if on_gpu else ())

    buffers = {"next_tile": plgpu.SMEM((_QUEUE_SLOTS,), jnp.int32)}
    if plan.of_keys:
        results, rows = plan.widths, operands["k"].shape[1]
        copies = [(_STAGES, plan.panels + 2), (1, plan.panels)]
        buffers["blocks"] = panels(_STAGES, plan.panels, BLOCK)
        buffers["fixed"] = panels(plan.panels, TILE)
        buffers["statistics"] = plgpu.SMEM((_STAGES, 2, BLOCK), jnp.float32)
    else:
        results, rows = (plan.K,), plan.queries
        copies = [(_STAGES, plan.K // PANEL + 1)]
        buffers["blocks"] = panels(_STAGES, plan.K // PANEL, BLOCK)
        buffers["cells"] = panels(_STAGES, plan.tile)
    sizes = [(_QUEUE_SLOTS, 1), *copies]
    scratch = [Ring.scratch(stages, each, CONSUMERS, interpret) for stages, each in sizes]
    shapes: list[tuple[int, ...]] = [
        (sequences, rows, plan.order.heads, width) for width in results
    ]
    if plan.of_keys:
        shapes.append((plan.all_cells * BLOCK, PANEL))

    def body(*refs: Any) -> None:
        names = [*operands, *range(len(shapes)), *buffers]
        fields = dict(zip(names, refs, strict=False))
        results_g = [fields.pop(i) for i in range(len(shapes))]
        if plan.of_keys:
            fields["d_s"] = results_g.pop()
        staging, *barriers = refs[len(names) :]
        views = staging if on_gpu else (staging, staging)
        fields |= {"results": tuple(results_g), "staging": views[0], "staging_untiled": views[1]}
        memory, barriers = _Memory(**fields), iter(barriers)
        rings = []
        for size, types in zip(sizes, scratch, strict=True):
            own = [next(barriers) for _ in types]
            rings.append(Ring.of(size[0], CONSUMERS, own, interpret))
            rings[-1].initialise()
        warpgroup = lax.axis_index("wg")
        roles = (_copy_queries, _KeyTiles) if plan.of_keys else (_copy_keys, _QueryTiles)
        copy_blocks, consumer = roles

        @when(warpgroup == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            when(first_warp(on_gpu))(lambda: _produce(plan, memory, rings, copy_blocks))

        @when(warpgroup != CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            consumer.of(plan, memory, rings, _uniform(warpgroup, on_gpu)).run()

    # Profiles show it.
    body.__name__ = "mla_prefill_gradient_of_" + ("keys" if plan.of_keys else "queries")
    kernel = grid_kernel(
        body,
        [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes],
        [
            *buffers.values(),
            two_views((CONSUMERS, ROWS, PANEL), jnp.bfloat16, on_gpu=on_gpu),
            *(each for ring in scratch for each in ring),
        ],
        warpgroups=CONSUMERS + 1,
        grid={"cta": plan.ctas},
        interpret=interpret,
        approx_math=True,
        lowering_semantics=LANE,
        reduction_scratch_bytes=0,
    )
    return list(kernel(*operands.values()))


def _produce(
    plan: Plan, memory: _Memory, rings: list[Ring], copy_blocks: Callable[..., Any]
) -> None:
    """Takes tiles one after another, and copies their operands. One warp calls it."""
    counter = None if plan.interpreted else pl.get_global(plgpu.SemaphoreType.REGULAR)
    queue, *others = rings

    def copy_tile(carry: Any) -> Any:
        tile, (queue_state, *states) = carry
        states = copy_blocks(plan, memory, others, tile, states)
        return pass_next_tile(tile, queue_state), [queue.next(queue_state), *states]

    def pass_next_tile(tile: Any, state: PipelineState) -> Any:
        """Claims the next tile, and passes it to the consumers."""
        queue.wait_empty(state)
        if plan.interpreted:  # it has no atomic addition, so each CTA takes every ctas-th tile
            memory.next_tile[state.stage] = tile + plan.ctas
            plgpu.commit_smem()
        else:
            claim_tile(counter, memory.next_tile, state.stage, plan.ctas)
        queue.full.arrive(state.stage)
        return memory.next_tile[state.stage]

    start = lax.axis_index("cta"), [ring.start() for ring in rings]
    _, states = lax.while_loop(lambda c: c[0] < plan.tiles, copy_tile, start)
    for ring, state in zip(rings, states, strict=True):
        ring.drain(state)


def _panel_copies(sources: Any, b: Any, h: Any, rows: Any, targets: Any) -> list[TmaCopy]:
    windows = [(source, c) for source in sources for c in range(0, source.shape[-1], PANEL)]
    return [
        TmaCopy(source, (b, rows, h, pl.ds(c, PANEL)), targets.at[i], tiled=False)
        for i, (source, c) in enumerate(windows)
    ]


def _copy_queries(
    plan: Plan, memory: _Memory, rings: list[Ring], tile: Any, states: list[PipelineState]
) -> list[PipelineState]:
    """Copies a tile's keys and values, and its blocks of queries."""
    (blocks, fixed), (state, fixed_state) = rings, states
    b, h, row = plan.position_of(tile)
    b, h = memory.locate(plan, b, h)
    first, count = plan.blocks_of(row, memory.starts[b], memory.lengths[b])
    of_tile = _panel_copies((memory.k, memory.v), b, h, pl.ds(row, TILE), memory.fixed)
    fixed.fill(fixed_state, of_tile)

    def copy_block(i: Any, state: PipelineState, carry: tuple[()]) -> tuple[()]:
        rows, target = pl.ds((first + i) * BLOCK, BLOCK), memory.blocks.at[state.stage]
        copies = _panel_copies((memory.q, memory.d_out), b, h, rows, target)
        statistics = [
            TmaCopy(x, (b, h, rows), memory.statistics.at[state.stage, n], contiguous=True)
            for n, x in enumerate((memory.lse, memory.delta))
        ]
        blocks.fill(state, [*copies, *statistics])
        return carry

    state, _ = blocks.loop(count, copy_block, state, ())
    return [state, fixed.next(fixed_state)]


def _copy_keys(
    plan: Plan, memory: _Memory, rings: list[Ring], tile: Any, states: list[PipelineState]
) -> list[PipelineState]:
    """Copies a tile's blocks of keys, and their cells."""
    (blocks,), (state,) = rings, states
    b, h, row = plan.position_of(tile)
    of_all = memory.locate(plan, b, h)
    start, length = memory.starts[of_all[0]], memory.lengths[of_all[0]]

    def copy_block(i: Any, state: PipelineState, carry: tuple[()]) -> tuple[()]:
        target, rows = memory.blocks.at[state.stage], pl.ds(i * BLOCK, BLOCK)
        copies = _panel_copies((memory.k,), *of_all, rows, target)
        cell = plan.cells_of(b, h, i) + lax.div(row, jnp.int32(BLOCK))
        window = pl.ds(cell * BLOCK, plan.tile), pl.ds(0, PANEL)
        of_cells = TmaCopy(memory.d_s, window, memory.cells.at[state.stage], tiled=False)
        blocks.fill(state, [*copies, of_cells])
        return carry

    count = plan.seen_by(row + plan.tile, start, length)
    state, _ = blocks.loop(count, copy_block, state, ())
    return [state]


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """A consumer warpgroup, which computes its rows of every tile of its CTA."""

    plan: Plan
    memory: _Memory
    rings: list[Ring]
    warpgroup: jax.Array
    blocks: Any  # base of the first stage's operands on a GPU
    other: Any  # base of the fixed operands, or of the first stage's cells
    staging: Any  # base of the warpgroup's staging

    @classmethod
    def of(cls, plan: Plan, memory: _Memory, rings: list[Ring], warpgroup: jax.Array) -> Any:
        bases = [None] * 3
        if not plan.interpreted:
            other = memory.fixed if plan.of_keys else memory.cells
            offset = warpgroup * jnp.int32(plan.rows * _ROW_BYTES)
            staging = warpgroup * jnp.int32(ROWS * _ROW_BYTES)
            places = (memory.blocks, 0), (other, offset), (memory.staging_untiled, staging)
            bases = [wgmma.operand_base(*place) for place in places]
        return cls(plan, memory, rings, warpgroup, *bases)

    def sum_blocks(self, tile: Any, states: Any) -> tuple[Any, Any]:
        """Returns the states of the rings after a tile, and its sums: of each block of a
        warpgroup's rows, those of each result."""
        raise NotImplementedError

    def run(self) -> None:
        plan, rings, memory = self.plan, self.rings, self.memory
        queue = rings[0]
        for ring in rings:
            ring.release_all()

        def compute_tile(carry: Any) -> Any:
            tile, (queue_state, *states) = carry
            states, sums = self.sum_blocks(tile, states)
            queue.wait_full(queue_state)
            next_tile = _uniform(memory.next_tile[queue_state.stage], not plan.interpreted)
            queue.release(queue_state)
            # Computed again, which is cheaper than keeping it in registers meanwhile.
            b, h, row = plan.position_of(_uniform(tile, not plan.interpreted))
            for i, of_rows in enumerate(sums):
                self.store(b, h, row + self.warpgroup * plan.rows + i * ROWS, of_rows)
            return next_tile, [queue.next(queue_state), *states]

        start = lax.axis_index("cta"), [ring.start() for ring in rings]
        lax.while_loop(lambda c: c[0] < plan.tiles, compute_tile, start)
        plgpu.wait_smem_to_gmem(0)

    def store(self, b: Any, h: Any, row: Any, sums: Any) -> None:
        """Rounds and stores 64 rows of a tile, if there are any."""
        plan, memory = self.plan, self.memory
        factors = plan.scale, 1.0
        warpgroup = _uniform(self.warpgroup, not plan.interpreted)

        @when(row < (plan.keys if plan.of_keys else plan.queries))
        def _() -> None:
            for x, factor, result in zip(sums, factors, memory.results, strict=False):
                for c in range(0, x.shape[1], PANEL):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    panel = x[:, c : c + PANEL] * factor
                    memory.staging[warpgroup] = panel.astype(jnp.bfloat16)
                    plgpu.commit_smem()
                    window = b, pl.ds(row, ROWS), h, pl.ds(c, PANEL)
                    staged = memory.staging_untiled.at[warpgroup]
                    plgpu.copy_smem_to_gmem(staged, result.at[window])

    def bounds_of(self, b: Any) -> list[Any]:
        """Returns the start and the length of a sequence."""
        arrays = self.memory.starts, self.memory.lengths
        return [_uniform(x[b], not self.plan.interpreted) for x in arrays]

    def complete(self, product: jax.Array, later: int = 0) -> jax.Array:
        return product if self.plan.interpreted else wgmma.wait_for_product(product, later)

    def block_operand(self, stage: Any, panels: range) -> jax.Array:
        """Returns panels of a block, in the interpreter."""
        return jnp.concatenate([self.memory.blocks[stage, j] for j in panels], axis=1)


def _skip(ring: Ring, count: Any, state: PipelineState) -> PipelineState:
    """Releases so many stages without using them."""

    def skip(i: Any, state: PipelineState, carry: tuple[()]) -> tuple[()]:
        ring.wait_full(state)
        ring.release(state)
        return carry

    return ring.loop(count, skip, state, ())[0]


def _uniform(x: jax.Array, on_gpu: bool) -> jax.Array:
    """Returns ``x``, an int32 that is equal in all threads, in a uniform register."""
    if not on_gpu:
        return x

    @inline(SCALAR, returns=INT32)
    def maximum(x: Registers) -> Registers:
        text = "redux.sync.max.u32 $0, $1, 0xffffffff;"
        return scalar(asm(text, "=r,r", value_of(x), result=i32(), effects=True))

    return maximum(x)


def _zeros(columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), WGMMA)


# ---- the kernel of keys --------------------------------------------------------------------------


class _KeyTiles(_Tiles):
    """A consumer of the kernel of keys: rows are keys, and columns queries."""

    def sum_blocks(self, tile: Any, states: Any) -> tuple[Any, Any]:
        plan, (_, ring, fixed), (state, fixed_state) = self.plan, self.rings, states
        b, h, row = plan.position_of(tile)
        of_all = self.memory.locate(plan, b, h)
        start, length = self.bounds_of(of_all[0])
        first, count = plan.blocks_of(row, start, length)
        row = row + self.warpgroup * ROWS
        hidden = plan.hidden_of(row, start, first, count)
        columns = plan.first_columns(row, start, length, first + hidden)
        columns = thread_bounds(columns, interpreted=plan.interpreted)
        cell = plan.cells_of(b, h, lax.div(row, jnp.int32(BLOCK))) + first + hidden
        cell = _uniform(cell, not plan.interpreted)

        def add_block(i: Any, state: PipelineState, sums: Any) -> Any:
            ring.wait_full(state)
            sums = self.add_queries(state.stage, sums, columns - i * BLOCK, cell + i)
            ring.release(state)
            return sums

        fixed.wait_full(fixed_state)
        state = _skip(ring, hidden, state)
        sums = tuple(map(_zeros, plan.widths))
        state, sums = ring.loop(count - hidden, add_block, state, sums)
        fixed.release(fixed_state)
        return [state, fixed.next(fixed_state)], [sums]

    def add_queries(
        self, stage: Any, sums: Sequence[jax.Array], columns: jax.Array, cell: Any
    ) -> tuple[jax.Array, ...]:
        """Adds a block of queries to d_k and d_v, and stores its cell of d_S.

        Registers are scarce: the sums take 160 of 240, and scores and d_P 32 each. So d_P starts
        when P is known. Meanwhile d_v gets the product of P's first columns while the next ones are
        computed, and d_k likewise that of d_S. d_S is stored while the tensor cores add it."""
        plan, (d_k, d_v) = self.plan, sums
        scores = self.complete(self.start(stage, 0))
        scores = mask_thread_columns(scores, columns, from_bound=True, interpreted=plan.interpreted)
        factors, steps = [], range(0, BLOCK, _STEP)

        def add_p(c: int) -> None:
            exponents = scores[:, c : c + _STEP] * (plan.scale * LOG2E)
            p = jnp.exp2(exponents - self.of_columns(stage, 0, c))
            factors.append(p.astype(jnp.bfloat16))

        for c in steps[:-1]:
            add_p(c)
            d_v = self.add(factors[-1], stage, 1, d_v, c)
        add_p(steps[-1])
        d_p = self.start(stage, 1)
        d_v = self.add(factors[-1], stage, 1, d_v, steps[-1])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the cell before
        d_p = self.complete(d_p, later=1)
        for c in steps:
            p = widened(factors[c // _STEP], not plan.interpreted)
            d_s = p * (d_p[:, c : c + _STEP] - self.of_columns(stage, 1, c))
            factors.append(d_s.astype(jnp.bfloat16))
            d_k = self.add(factors[-1], stage, 0, d_k, c)
            if not plan.interpreted:
                store_swizzled(factors[-1], self.staging, c)
        self.store_cell(factors[len(steps) :], cell)
        d_k, d_v = self.complete(d_k), self.complete(d_v)
        if not plan.interpreted:
            wgmma.keep_live(*factors)
        return d_k, d_v

    def store_cell(self, parts: Sequence[jax.Array], cell: Any) -> None:
        """Starts the copy of a cell, which on a GPU is in the staging memory."""
        memory, plan = self.memory, self.plan
        warpgroup = _uniform(self.warpgroup, not plan.interpreted)
        if plan.interpreted:
            memory.staging[warpgroup] = jnp.concatenate(parts, axis=1)
        plgpu.commit_smem()
        target = memory.d_s.at[pl.ds(cell * BLOCK, BLOCK)]
        plgpu.copy_smem_to_gmem(memory.staging_untiled.at[warpgroup], target)

    def of_columns(self, stage: Any, i: int, first: int) -> jax.Array:
        """Returns lse (i = 0) or delta (i = 1) of a step of a stage's queries, which are columns.
        They are loaded just before use, because those of all would take 16 registers."""
        ref = self.memory.statistics.at[stage, i, pl.ds(first, _STEP)]
        numbers = ref[...] if self.plan.interpreted else load_with_layout(ref, COLUMN)
        return spread_columns(numbers, ROWS)

    def start(self, stage: Any, i: int) -> jax.Array:
        """Starts the product of k or v (i = 0, 1) with a block of q or d_out."""
        plan = self.plan
        if plan.interpreted:
            rows = pl.ds(self.warpgroup * ROWS, ROWS)
            fixed = [self.memory.fixed[j, rows] for j in self.panels_of(i)]
            block = self.block_operand(stage, self.panels_of(i))
            return _dot(jnp.concatenate(fixed, axis=1), block.T)
        a, b = self.other + jnp.int32(i * self.units_before(TILE)), self.block_base(stage, i)
        sizes = {"columns": BLOCK, "a_rows": TILE, "b_rows": BLOCK}
        return wgmma.start_bfloat16_product(a, b, width=plan.widths[i], **sizes)

    def add(self, factor: jax.Array, stage: Any, i: int, sums: jax.Array, first: int) -> jax.Array:
        """Starts ``sums + factor B`` with rows of a block of q or d_out, from ``first`` on."""
        if self.plan.interpreted:
            rows = slice(first, first + factor.shape[1])
            return sums + _dot(factor, self.block_operand(stage, self.panels_of(i))[rows])
        base = self.block_base(stage, i) + jnp.int32(first * _ROW_BYTES // 16)
        return wgmma.add_registers_product(factor, base, sums, b_rows=BLOCK)

    def units_before(self, rows: int) -> int:
        """Returns the 16-byte units of a pair's first operand in panels of that many rows."""
        return self.plan.K // PANEL * rows * _ROW_BYTES // 16

    def block_base(self, stage: Any, i: int) -> jax.Array:
        stage_units = self.plan.panels * CELL_BYTES // 16
        return self.blocks + (stage * jnp.int32(stage_units) + i * self.units_before(BLOCK))

    def panels_of(self, i: int) -> range:
        first = self.plan.K // PANEL
        return range(first, self.plan.panels) if i else range(first)


# ---- the kernel of queries -----------------------------------------------------------------------


class _QueryTiles(_Tiles):
    """A consumer of the kernel of queries, with _PARTS blocks of 64 queries."""

    def sum_blocks(self, tile: Any, states: Any) -> tuple[Any, Any]:
        plan, (_, ring), (state,) = self.plan, self.rings, states
        b, h, row = plan.position_of(tile)
        start, length = self.bounds_of(self.memory.locate(plan, b, h)[0])
        count = plan.seen_by(row + plan.tile, start, length)
        row = row + self.warpgroup * plan.rows
        seen = [plan.seen_by(row + (i + 1) * ROWS, start, length) for i in range(_PARTS)]

        def add_block(first: int, i: Any, state: PipelineState, sums: Any) -> Any:
            """Adds a block of keys to d_q of the parts from ``first`` on, which see it."""
            ring.wait_full(state)
            started = [self.add(state.stage, n, sums[n]) for n in range(first, _PARTS)]
            sums = *sums[:first], *map(self.complete, started)
            ring.release(state)
            return sums

        sums = tuple(_zeros(plan.K) for _ in range(_PARTS))
        done = jnp.int32(0)
        for first, until in enumerate(seen):
            adds = functools.partial(add_block, first)
            state, sums = ring.loop(until - done, adds, state, sums)
            done = until
        return [_skip(ring, count - done, state)], [(x,) for x in sums]

    def add(self, stage: Any, part: int, sums: jax.Array) -> jax.Array:
        """Starts ``d_q + d_s k`` of a part."""
        plan = self.plan
        if plan.interpreted:
            queries = pl.ds(self.warpgroup * plan.rows + part * BLOCK, BLOCK)
            cell = self.memory.cells[stage, queries]
            return sums + _dot(cell.T, self.block_operand(stage, range(plan.K // PANEL)))
        cells, units = plan.tile * _ROW_BYTES // 16, CELL_BYTES // 16
        a = self.other + (stage * jnp.int32(cells) + part * units)
        b = self.blocks + stage * jnp.int32(plan.K // PANEL * units)
        return wgmma.add_bfloat16_product(a, b, sums, transposed_a=True, depth=BLOCK)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
