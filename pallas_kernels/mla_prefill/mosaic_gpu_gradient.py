"""The gradient of mla_prefill on Hopper GPUs: one kernel in two forms (bfloat16).

With ``delta = rowsum(out * d_out) - d_lse``, and sums over the visible pairs (see :mod:`blocked`)::

    p = exp(scale * q k^T - lse),  d_s = p * (d_out v^T - delta)
    of keys:     d_v = p^T d_out,  d_k = scale * d_s^T q
    of queries:                    d_q = scale * d_s k

Both forms compute p and d_s, seven matmuls instead of five. In return no sum crosses CTAs: every
result is summed in registers in one order, so equal calls give equal bits, and P and d_S go from
registers to the tensor cores without shared memory.

A tile is 128 keys, or 128 queries, of one head: the *fixed* pair of operands, k and v or q and
d_out, stays in shared memory. A producer warp streams blocks of the other pair through a ring of
stages by TMA, and takes tiles from a queue, the longest first, as the forward kernel does. Each of
two consumer warpgroups has 64 rows of the tile. For every block it

* computes the scores ``A B^T`` of the first operands, and d_P of the second ones. Rows are those
  of the fixed pair, so in the form of keys both are transposed.
* computes P. In the form of keys its registers are the left operand of ``d_v += P d_out``.
* computes d_S. Its registers are the left operand of ``d_k += d_S q``, or of ``d_q += d_S k``.
  wgmma now reads by columns the block that the scores needed by rows.

Blocks that need a mask come first: the diagonal is at the first queries that see a key, and at the
last keys that a query sees. A warpgroup skips blocks that none of its rows sees. In the form of
queries a second loop over the blocks that are seen whole has no mask.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.hopper import multiprocessors, require_hopper, wgmma
from pallas_kernels.hopper.barriers import TmaCopy
from pallas_kernels.hopper.ir import (
    INT32,
    SCALAR,
    Registers,
    array,
    asm,
    asm_numbers,
    f32,
    float_pair,
    i32,
    inline,
    scalar,
    value_of,
    words_of,
)
from pallas_kernels.hopper.launch import LANE, grid_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.online_softmax import LOG2E
from pallas_kernels.hopper.ring import PipelineState, Ring
from pallas_kernels.hopper.tiles import (
    COLUMN,
    ROW,
    ROWS,
    WGMMA,
    load_with_layout,
    spread_columns,
    spread_rows,
    two_views,
)
from pallas_kernels.hopper.warpgroup import first_warp, when
from pallas_kernels.mla_prefill import reference
from pallas_kernels.mla_prefill.tiles import (
    HeadTiles,
    claim_tile,
    mask_thread_columns,
    thread_bounds,
)

CONSUMERS = 2  # warpgroups
TILE = CONSUMERS * ROWS
PANEL = 64  # columns: a panel has rows of 128 bytes, the width of a swizzle atom
L2_BYTES = 24 << 20  # share of the L2 cache for the streamed operands of concurrent heads
_ROW_BYTES = 128
_STEP = 16  # queries or keys: the K of a wgmma instruction
_QUEUE_SLOTS = 2
# Registers per thread. Three warpgroups have 504 together, and 2 x 240 + 24 = 504.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24


def gradients(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    starts: Int[Array, " B"] | None,
    lengths: Int[Array, " B"] | None,
    out: Float[Array, "B T H V"],
    lse: Float32[Array, "B T H"],
    d_out: Float[Array, "B T H V"],
    d_lse: Float32[Array, "B T H"] | None,
    *,
    scale: float,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S H K"], Float[Array, "B S H V"]]:
    """Returns the gradients of q, k and v, as :func:`blocked.gradients`. Equal calls give equal
    bits."""
    require_hopper(interpret)
    arrays = {"q": q, "k": k, "v": v, "d_out": d_out}
    if wrong := {name: x.dtype.name for name, x in arrays.items() if x.dtype != jnp.bfloat16}:
        raise NotImplementedError(f"takes bfloat16, got {wrong}")
    K, V = q.shape[-1], v.shape[-1]
    if K % PANEL or V % PANEL or not 0 < V <= min(K, 128) or K > 192:
        raise NotImplementedError(
            "takes keys 64, 128 or 192 wide and values 64 or 128 wide, no wider than the keys,"
            f" got {K} and {V}"
        )
    if 0 in q.shape or 0 in k.shape:
        raise NotImplementedError(f"takes no empty arrays, got q {q.shape} and k {k.shape}")

    T, S = q.shape[1], k.shape[1]
    if lengths is not None:
        # Keys and values past the end may be NaN, and 0 * NaN is NaN.
        valid = (jnp.arange(S) < lengths[:, None])[..., None, None]
        k, v = jnp.where(valid, k, 0), jnp.where(valid, v, 0)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    delta = delta if d_lse is None else delta - d_lse
    lse = jnp.where(lse == -jnp.inf, 0.0, lse) * LOG2E  # queries that see no key: all is masked
    # TMA copies of one dimension are not clipped at T.
    lse, delta = (_padded(x.swapaxes(1, 2), 2, pl.cdiv(T, TILE) * TILE) for x in (lse, delta))
    starts, lengths = (x.astype(jnp.int32) for x in reference.bounds(k, starts, lengths))
    # A box of a TMA copy is no larger than the array.
    q, d_out = (_padded(x, 1, max(T, TILE)) for x in (q, d_out))
    k, v = (_padded(x, 1, max(S, TILE)) for x in (k, v))
    operands = q, k, v, d_out, lse, delta, starts, lengths

    def of(keys: bool) -> list[jax.Array]:
        plan = _Plan.of(q, k, v, T, S, float(scale), keys, interpret)
        return _launch(operands, plan=plan, interpret=interpret)

    d_k, d_v = of(keys=True)
    (d_q,) = of(keys=False)
    return d_q[:, :T], d_k[:, :S], d_v[:, :S]


def _padded(x: jax.Array, axis: int, size: int) -> jax.Array:
    padding = [(0, 0)] * x.ndim
    padding[axis] = 0, size - x.shape[axis]
    return jnp.pad(x, padding) if padding[axis][1] else x


# ---- tiles ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The tiles of a call in one form, and their blocks."""

    of_keys: bool  # the form
    order: HeadTiles
    tiles: int  # of all heads and sequences
    queries: int  # of a sequence
    keys: int
    K: int
    V: int
    ctas: int
    scale: float
    interpreted: bool

    @classmethod
    def of(
        cls, q: jax.Array, k: jax.Array, v: jax.Array, T: int, S: int, scale: float, of_keys: bool,
        interpret: Any,
    ) -> _Plan:  # fmt: skip
        B, _, H, K = q.shape
        V, fixed, streamed = v.shape[-1], *((S, T) if of_keys else (T, S))
        order = HeadTiles.of(B, H, pl.cdiv(fixed, TILE), streamed * (K + V) * 2, L2_BYTES)
        tiles = B * H * order.per_head
        ctas = min(multiprocessors(), tiles)
        return cls(of_keys, order, tiles, T, S, K, V, ctas, scale, interpret is not None)

    @property
    def block(self) -> int:
        """Rows of a streamed block. More would take more registers than a thread has."""
        return 64 if self.of_keys else 96

    @property
    def stages(self) -> int:
        """As many as fit in shared memory with keys 192 wide: 200 KiB and 16 KiB of staging."""
        return 3 if self.of_keys else 2

    @property
    def widths(self) -> tuple[int, int]:
        return self.K, self.V

    @property
    def panels(self) -> int:
        """Panels of a pair of operands side by side, which are as many TMA copies."""
        return sum(self.widths) // PANEL

    @property
    def fixed_rows(self) -> int:
        return self.keys if self.of_keys else self.queries

    def position_of(self, tile: Any) -> tuple[Any, Any, Any]:
        """Returns the sequence, the head and the first row of a tile."""
        b, h, i = self.order.locate(tile)
        return b, h, (i if self.of_keys else self.order.per_head - 1 - i) * TILE

    def blocks_of(self, row: Any, start: Any, length: Any) -> tuple[Any, Any]:
        """Returns the first block of a tile, and the number of blocks, at least 1. Those after the
        first follow in ascending order of queries, or descending order of keys."""
        if self.of_keys:
            count = pl.cdiv(self.queries, self.block)
            first = jnp.minimum(_quotient(row - start, self.block), count - 1)
            first = jnp.where(row < length, first, count - 1)
            return first, count - first
        visible = jnp.clip(jnp.minimum(length, start + row + TILE), 0, self.keys)
        count = jnp.maximum(_quotient(visible + self.block - 1, self.block), 1)
        return count - 1, count

    def first_row_of(self, first: Any, i: Any) -> Any:
        """Returns the first row of a tile's i-th block."""
        return (first + i if self.of_keys else first - i) * self.block

    def hidden_of(self, row: Any, start: Any, length: Any, first: Any, count: Any) -> Any:
        """Returns how many of a tile's blocks are hidden from all rows of a warpgroup, which begin
        at ``row``. They are the first ones."""
        if self.of_keys:
            return jnp.clip(_quotient(row - start, self.block) - first, 0, count)
        visible = jnp.minimum(length, start + row + ROWS)
        return jnp.maximum(count - _quotient(visible + self.block - 1, self.block), 0)

    def whole_of(self, row: Any, start: Any, length: Any) -> Any:
        """Returns how many blocks of keys all rows of a warpgroup see whole. They are the last
        ones of its tile."""
        return _quotient(jnp.minimum(length, start + row + 1), self.block)

    def column_bounds(self, row: Any, start: Any, length: Any, first: Any) -> jax.Array:
        """Returns a column of the first block for each row, in the ROW layout, from ``row`` on.
        Where queries are columns, those from it on see the row's key. Where keys are columns, the
        row's query sees those before it."""
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW) + row
        if self.of_keys:
            return jnp.where(row < length, row - (start + first * self.block), 1 << 30)
        return jnp.minimum(row + (start + 1), length) - first * self.block

    def bounds_of_block(self, bounds: jax.Array, i: Any) -> jax.Array:
        """Returns the bounds in the i-th block, of those in the first one."""
        return bounds - i * self.block if self.of_keys else bounds + i * self.block


def _quotient(a: Any, b: int) -> Any:
    """Returns ``a // b``, or 0 if a is negative."""
    return lax.div(jnp.maximum(a, 0), jnp.int32(b))


# ---- launch and roles ----------------------------------------------------------------------------


class _Memory(NamedTuple):
    """References to everything that the kernel reads and writes, except barriers."""

    # in global memory
    q: Any
    k: Any
    v: Any
    d_out: Any
    lse: Any  # [B, H, T padded to tiles], in base 2
    delta: Any
    starts: Any
    lengths: Any
    results: tuple[Any, ...]  # d_k and d_v, or d_q
    # in shared memory
    fixed: Any  # panels [panels, TILE, PANEL]
    blocks: Any  # panels [stages, panels, block, PANEL]
    statistics: Any  # lse and delta of queries, [stages, 2, block] or [1, 2, TILE]
    next_tile: Any
    staging: Any  # tiled [CONSUMERS, ROWS, PANEL]: results on their way out
    staging_untiled: Any


class _Rings(NamedTuple):
    fixed: Ring
    blocks: Ring
    queue: Ring  # of tiles, from the producer to the consumers

    def initialise(self) -> None:
        for ring in self:
            ring.initialise()

    def start(self) -> tuple[PipelineState, ...]:
        return tuple(ring.start() for ring in self)


@lowered_once("plan", "interpret")
def _launch(operands: Sequence[jax.Array], *, plan: _Plan, interpret: Any) -> list[jax.Array]:
    """Returns d_k and d_v, or d_q, of padded operands."""
    on_gpu, with_fixed, q, k, v = interpret is None, not plan.of_keys, *operands[:3]
    sizes = [
        (1, plan.panels + 2 * with_fixed),
        (plan.stages, plan.panels + 2 * (not with_fixed)),
        (_QUEUE_SLOTS, 1),
    ]
    scratch = [Ring.scratch(stages, copies, CONSUMERS, interpret) for stages, copies in sizes]
    results = (k, v) if plan.of_keys else (q,)

    def body(*refs: Any) -> None:
        inputs, refs = refs[: len(operands)], refs[len(operands) :]
        results_g, refs = refs[: len(results)], refs[len(results) :]
        *buffers, staging = refs[:5]
        barriers, rings = iter(refs[5:]), []
        for size, types in zip(sizes, scratch, strict=True):
            own = [next(barriers) for _ in types]
            rings.append(Ring.of(size[0], CONSUMERS, own, interpret))
        views = staging if on_gpu else (staging, staging)
        fields: Any = (*inputs, results_g, *buffers, *views)
        memory, rings = _Memory(*fields), _Rings(*rings)
        rings.initialise()
        warpgroup = lax.axis_index("wg")

        @when(warpgroup == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            when(first_warp(on_gpu))(lambda: _produce(plan, memory, rings))

        @when(warpgroup != CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            _Consumer(plan, memory, rings, _uniform(warpgroup, on_gpu)).run()

    # Profiles show it.
    body.__name__ = "mla_prefill_gradient_of_" + ("keys" if plan.of_keys else "queries")

    def panels(*shape: int) -> Any:
        swizzle = (plgpu.SwizzleTransform(_ROW_BYTES),)
        return plgpu.SMEM((*shape, PANEL), jnp.bfloat16, transforms=swizzle if on_gpu else ())

    statistics = (plan.stages, 2, plan.block) if plan.of_keys else (1, 2, TILE)
    kernel = grid_kernel(
        body,
        [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in results],
        [
            panels(plan.panels, TILE),
            panels(plan.stages, plan.panels, plan.block),
            plgpu.SMEM(statistics, jnp.float32),
            plgpu.SMEM((_QUEUE_SLOTS,), jnp.int32),
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
    return list(kernel(*operands))


def _produce(plan: _Plan, memory: _Memory, rings: _Rings) -> None:
    """Takes tiles one after another, and copies their fixed operands and their blocks. One warp
    calls it."""
    counter = None if plan.interpreted else pl.get_global(plgpu.SemaphoreType.REGULAR)
    of_keys, of_queries = (memory.k, memory.v), (memory.q, memory.d_out)
    fixed, streamed = (of_keys, of_queries) if plan.of_keys else (of_queries, of_keys)

    def copies(sources: Any, b: Any, h: Any, rows: Any, targets: Any) -> list[TmaCopy]:
        windows = [(source, c) for source in sources for c in range(0, source.shape[-1], PANEL)]
        return [
            TmaCopy(source, (b, rows, h, pl.ds(c, PANEL)), targets.at[i], tiled=False)
            for i, (source, c) in enumerate(windows)
        ]

    def statistics(b: Any, h: Any, rows: Any, target: Any) -> list[TmaCopy]:
        return [
            TmaCopy(source, (b, h, rows), target.at[i], contiguous=True)
            for i, source in enumerate((memory.lse, memory.delta))
        ]

    def copy_tile(carry: Any) -> Any:
        tile, (fixed_state, state, queue_state) = carry
        b, h, row = plan.position_of(tile)
        first, count = plan.blocks_of(row, memory.starts[b], memory.lengths[b])
        rows = pl.ds(row, TILE)
        of_tile = copies(fixed, b, h, rows, memory.fixed)
        if not plan.of_keys:
            of_tile += statistics(b, h, rows, memory.statistics.at[0])
        rings.fixed.fill(fixed_state, of_tile)
        next_tile = pass_next_tile(tile, queue_state)

        def copy_block(i: Any, state: PipelineState, carry: tuple[()]) -> tuple[()]:
            rows = pl.ds(plan.first_row_of(first, i), plan.block)
            of_block = copies(streamed, b, h, rows, memory.blocks.at[state.stage])
            if plan.of_keys:
                of_block += statistics(b, h, rows, memory.statistics.at[state.stage])
            rings.blocks.fill(state, of_block)
            return carry

        state, _ = rings.blocks.loop(count, copy_block, state, ())
        return next_tile, (rings.fixed.next(fixed_state), state, rings.queue.next(queue_state))

    def pass_next_tile(tile: Any, state: PipelineState) -> Any:
        """Claims the next tile, and passes it to the consumers."""
        rings.queue.wait_empty(state)
        if plan.interpreted:  # it has no atomic addition, so each CTA takes every ctas-th tile
            memory.next_tile[state.stage] = tile + plan.ctas
            plgpu.commit_smem()
        else:
            claim_tile(counter, memory.next_tile, state.stage, plan.ctas)
        rings.queue.full.arrive(state.stage)
        return memory.next_tile[state.stage]

    start = lax.axis_index("cta"), rings.start()
    _, states = lax.while_loop(lambda c: c[0] < plan.tiles, copy_tile, start)
    for ring, state in zip(rings, states, strict=True):
        ring.drain(state)


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """A consumer warpgroup, which computes 64 rows of every tile of its CTA."""

    plan: _Plan
    memory: _Memory
    rings: _Rings
    warpgroup: jax.Array

    def run(self) -> None:
        plan, rings, memory = self.plan, self.rings, self.memory
        for ring in rings:
            ring.release_all()
        operands = _Operands.of(plan, memory, self.warpgroup)

        def compute_tile(carry: Any) -> Any:
            tile, (fixed_state, state, queue_state) = carry
            b, h, row = plan.position_of(tile)
            row = row + self.warpgroup * ROWS
            rings.fixed.wait_full(fixed_state)
            state, sums = self.sum_blocks(b, row, state, operands)
            rings.fixed.release(fixed_state)
            rings.queue.wait_full(queue_state)
            next_tile = _uniform(memory.next_tile[queue_state.stage], not plan.interpreted)
            rings.queue.release(queue_state)
            # Computed again, which is cheaper than keeping it in registers meanwhile.
            b, h, row = plan.position_of(_uniform(tile, not plan.interpreted))
            self.store(b, h, row + self.warpgroup * ROWS, sums)
            states = rings.fixed.next(fixed_state), state, rings.queue.next(queue_state)
            return next_tile, states

        start = lax.axis_index("cta"), rings.start()
        lax.while_loop(lambda c: c[0] < plan.tiles, compute_tile, start)
        plgpu.wait_smem_to_gmem(0)

    def sum_blocks(self, b: Any, row: Any, state: PipelineState, operands: _Operands) -> Any:
        """Returns the state of the ring after a tile, and the sums: of d_k and d_v, or of d_q."""
        plan, memory, ring = self.plan, self.memory, self.rings.blocks
        start, length = (
            _uniform(x[b], not plan.interpreted) for x in (memory.starts, memory.lengths)
        )
        first, count = plan.blocks_of(row - self.warpgroup * ROWS, start, length)
        hidden = plan.hidden_of(row, start, length, first, count)
        bounds = plan.column_bounds(row, start, length, first)
        bounds = thread_bounds(bounds, interpreted=plan.interpreted)
        lse_and_delta = None if plan.of_keys else operands.statistics_of_rows()

        def skip(i: Any, state: PipelineState, sums: tuple[()]) -> tuple[()]:
            ring.wait_full(state)
            ring.release(state)
            return sums

        def add_block(is_masked: bool, i: Any, state: PipelineState, sums: Any) -> Any:
            def mask(scores: jax.Array) -> jax.Array:
                shifted = plan.bounds_of_block(bounds, hidden + i)
                options = {"from_bound": plan.of_keys, "interpreted": plan.interpreted}
                hide = functools.partial(mask_thread_columns, bounds=shifted, **options)
                return hide(scores) if is_masked else scores

            ring.wait_full(state)
            if lse_and_delta is None:
                sums = operands.add_queries(state.stage, sums, mask)
            else:
                sums = operands.add_keys(state.stage, sums, mask, *lse_and_delta)
            ring.release(state)
            return sums

        state, _ = ring.loop(hidden, skip, state, ())
        sums = tuple(map(_zeros, plan.widths if plan.of_keys else (plan.K,)))
        if plan.of_keys:  # a second loop would take more registers than there are
            return ring.loop(count - hidden, functools.partial(add_block, True), state, sums)
        whole = jnp.minimum(plan.whole_of(row, start, length), count - hidden)
        masked = count - hidden - whole
        state, sums = ring.loop(masked, functools.partial(add_block, True), state, sums)
        return ring.loop(whole, functools.partial(add_block, False), state, sums)

    def store(self, b: Any, h: Any, row: Any, sums: Any) -> None:
        """Rounds and stores a warpgroup's rows of a tile, if there are any."""
        plan, memory = self.plan, self.memory
        factors = plan.scale, 1.0
        warpgroup = _uniform(self.warpgroup, not plan.interpreted)

        @when(row < plan.fixed_rows)
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


def _uniform(x: jax.Array, on_gpu: bool) -> jax.Array:
    """Returns ``x``, an int32 that is equal in all threads, in a uniform register."""
    if not on_gpu:
        return x

    @inline(SCALAR, returns=INT32)
    def maximum(x: Registers) -> Registers:
        text = "redux.sync.max.u32 $0, $1, 0xffffffff;"
        return scalar(asm(text, "=r,r", value_of(x), result=i32(), effects=True))

    return maximum(x)


def _widened(p: jax.Array, on_gpu: bool) -> jax.Array:
    """Returns bfloat16 ``p`` as float32, from its packed registers. If the compiler knew where they
    come from, it would keep the float32 numbers in registers, which are too few."""
    if not on_gpu:
        return p.astype(jnp.float32)

    @inline(WGMMA, returns=plgpu.ShapeDtypeStruct(p.shape, jnp.float32, layout=WGMMA))
    def widen(p: Registers) -> Registers:
        pairs = []
        for word in words_of(p):
            text = "shl.b32 $0, $2, 16;\nand.b32 $1, $2, 0xffff0000;"
            numbers = asm_numbers(text, "=&r,=r,r", word, kind=i32(), count=2)
            pairs.append(float_pair(*(arith.bitcast(f32(), x) for x in numbers)))
        return array(pairs, p.shape, WGMMA)

    return widen(p)


def _zeros(columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), WGMMA)


@dataclasses.dataclass(frozen=True)
class _Operands:
    """The operands in shared memory of a warpgroup's matmuls, and the matmuls."""

    plan: _Plan
    memory: _Memory
    warpgroup: jax.Array
    fixed: Any  # base of the fixed pair's first operand on a GPU
    blocks: Any  # base of the first stage

    @classmethod
    def of(cls, plan: _Plan, memory: _Memory, warpgroup: jax.Array) -> _Operands:
        fixed = blocks = None
        if not plan.interpreted:
            fixed = wgmma.operand_base(memory.fixed, warpgroup * jnp.int32(ROWS * _ROW_BYTES))
            blocks = wgmma.operand_base(memory.blocks, 0)
        return cls(plan, memory, warpgroup, fixed, blocks)

    def statistics_of_rows(self) -> list[jax.Array]:
        """Returns lse and delta of the tile's queries."""
        rows = pl.ds(self.warpgroup * ROWS, ROWS)
        return [self.load(self.memory.statistics.at[0, i, rows], ROW) for i in range(2)]

    def load(self, ref: Any, layout: Any) -> jax.Array:
        return ref[...] if self.plan.interpreted else load_with_layout(ref, layout)

    # ---- the two forms ----

    def add_queries(
        self, stage: Any, sums: Sequence[jax.Array], mask: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, ...]:
        """Adds a block of queries to d_k and d_v.

        Registers are scarce: the sums take 160 of 240, and scores and d_P 32 each. So d_P starts
        when P is known. Meanwhile d_v gets the product of P's first columns while the next ones are
        computed, and d_k likewise that of d_S."""
        d_k, d_v = sums
        scores = mask(self.complete(self.start(stage, 0)))
        factors, steps = [], range(0, self.plan.block, _STEP)

        def add_p(c: int) -> None:
            lse = self.of_columns(stage, 0, c)
            factors.append(self.exponentials(scores[:, c : c + _STEP], lse).astype(jnp.bfloat16))

        for c in steps[:-1]:
            add_p(c)
            d_v = self.add(factors[-1], stage, 1, d_v, c)
        add_p(steps[-1])
        d_p = self.start(stage, 1)
        d_v = self.add(factors[-1], stage, 1, d_v, steps[-1])
        d_p = self.complete(d_p, later=1)
        for c in steps:
            p = _widened(factors[c // _STEP], not self.plan.interpreted)
            d_s = p * (d_p[:, c : c + _STEP] - self.of_columns(stage, 1, c))
            factors.append(d_s.astype(jnp.bfloat16))
            d_k = self.add(factors[-1], stage, 0, d_k, c)
        d_k, d_v = self.complete(d_k), self.complete(d_v)
        self.keep_live(factors)
        return d_k, d_v

    def add_keys(
        self,
        stage: Any,
        sums: Sequence[jax.Array],
        mask: Callable[[jax.Array], jax.Array],
        lse: jax.Array,
        delta: jax.Array,
    ) -> tuple[jax.Array, ...]:
        """Adds a block of keys to d_q. P is computed while the tensor cores compute d_P, and d_S
        while they add the product of its first columns."""
        (d_q,) = sums
        scores, d_p = (self.start(stage, i) for i in range(2))
        lse, delta = (spread_rows(x, self.plan.block) for x in (lse, delta))
        p = self.exponentials(mask(self.complete(scores, later=1)), lse)
        self.keep_live([p])  # without it ptxas would wait for d_P first
        factors, d_p = [], self.complete(d_p)
        for c in range(0, self.plan.block, _STEP):
            columns = slice(c, c + _STEP)
            d_s = p[:, columns] * (d_p[:, columns] - delta[:, columns])
            factors.append(d_s.astype(jnp.bfloat16))
            d_q = self.add(factors[-1], stage, 0, d_q, c)
        d_q = self.complete(d_q)
        self.keep_live(factors)
        return (d_q,)

    def exponentials(self, scores: jax.Array, lse: jax.Array) -> jax.Array:
        return jnp.exp2(scores * (self.plan.scale * LOG2E) - lse)

    def of_columns(self, stage: Any, i: int, first: int) -> jax.Array:
        """Returns lse (i = 0) or delta (i = 1) of a step of a stage's queries, which are columns.
        They are loaded just before use, because those of all would take 16 registers."""
        ref = self.memory.statistics.at[stage, i, pl.ds(first, _STEP)]
        return spread_columns(self.load(ref, COLUMN), ROWS)

    # ---- matmuls ----

    def start(self, stage: Any, i: int) -> jax.Array:
        """Starts the product of the fixed pair's operand i with that of a block."""
        plan = self.plan
        if plan.interpreted:
            return _dot(self.fixed_operand(i), self.block_operand(stage, i).T)
        a, b = self.fixed + jnp.int32(i * self.units_before(TILE)), self.block_base(stage, i)
        sizes = {"columns": plan.block, "a_rows": TILE, "b_rows": plan.block}
        return wgmma.start_bfloat16_product(a, b, width=plan.widths[i], **sizes)

    def add(
        self, factor: jax.Array, stage: Any, i: int, sums: jax.Array, first: int = 0
    ) -> jax.Array:
        """Starts ``sums + factor B`` with rows of a block's operand i, from ``first`` on."""
        plan, rows = self.plan, factor.shape[1]
        if plan.interpreted:
            return sums + _dot(factor, self.block_operand(stage, i)[first : first + rows])
        base = self.block_base(stage, i) + jnp.int32(first * _ROW_BYTES // 16)
        return wgmma.add_registers_product(factor, base, sums, b_rows=plan.block)

    def complete(self, product: jax.Array, later: int = 0) -> jax.Array:
        return product if self.plan.interpreted else wgmma.wait_for_product(product, later)

    def keep_live(self, factors: Sequence[jax.Array]) -> None:
        if not self.plan.interpreted:
            wgmma.keep_live(*factors)

    def units_before(self, rows: int) -> int:
        """Returns the 16-byte units of a pair's first operand in panels of that many rows."""
        return self.plan.K // PANEL * rows * _ROW_BYTES // 16

    def block_base(self, stage: Any, i: int) -> jax.Array:
        rows = self.plan.block
        stage_units = self.plan.panels * rows * _ROW_BYTES // 16
        return self.blocks + (stage * jnp.int32(stage_units) + i * self.units_before(rows))

    # ---- in the interpreter ----

    def fixed_operand(self, i: int) -> jax.Array:
        rows = pl.ds(self.warpgroup * ROWS, ROWS)
        return jnp.concatenate([self.memory.fixed[j, rows] for j in self.panels_of(i)], axis=1)

    def block_operand(self, stage: Any, i: int) -> jax.Array:
        return jnp.concatenate([self.memory.blocks[stage, j] for j in self.panels_of(i)], axis=1)

    def panels_of(self, i: int) -> range:
        first = self.plan.K // PANEL
        return range(first, self.plan.panels) if i else range(first)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
