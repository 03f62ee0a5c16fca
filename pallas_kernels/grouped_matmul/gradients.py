"""Gradients of the bfloat16 grouped matmul on Hopper GPUs: one kernel in two forms.

    d_lhs[m] = rhs[g(m)].T @ d_out[m]                         :func:`rows_gradient`
    d_rhs[g] = d_out[rows of g].T @ lhs[rows of g]            :func:`matrices_gradient`

It is persistent and warp-specialised, as :mod:`dense`: one warp keeps a ring of stages filled by
TMA, and two consumer warpgroups multiply and store. A stage has 64 steps of the contraction, and an
output tile is 128 x 256 or 256 x 128.

Four things are not obvious.

1.  wgmma reads either operand transposed from shared memory, so no matrix is transposed before.
2.  Groups start at any row, tiled TMA copies at multiples of eight. So whatever is copied
    transposed comes in panels of 64 columns: one swizzle atom wide, a panel is the same tiled and
    untiled. :func:`wgmma.add_bfloat16_product` reads several side by side.
3.  The rows gradient computes whole tiles and stores the rows of the group, because rows do not
    mix. The matrices gradient sums over rows: its last step must not add the next group's. It
    multiplies only as many sixteenths as the group has rows left, after zeroing in shared memory
    what follows the last row in its sixteenth. Both operands are zeroed: zero times NaN is NaN.
4.  A tile of the matrices gradient takes as long as its group has rows. The groups are taken in
    descending order of their size, and every second round of tiles is dealt in reverse, so that no
    CTA is left with the largest tiles.

Every sum has one order, whatever the other groups are. So equal calls give equal bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, BFloat16, Int

from pallas_kernels.grouped_matmul.dense import REGISTERS, store_rows, zeros
from pallas_kernels.grouped_matmul.dense_plan import CONSUMERS
from pallas_kernels.grouped_matmul.schedule import GroupTiles, TileScheduler, panel_height
from pallas_kernels.hopper import multiprocessors, wgmma
from pallas_kernels.hopper.barriers import TmaCopy
from pallas_kernels.hopper.ir import SCALAR, const, inline, instruction, shared_address, value_of
from pallas_kernels.hopper.launch import LANE, grid_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.ring import PipelineState, Ring
from pallas_kernels.hopper.tiles import ROWS, two_views
from pallas_kernels.hopper.warpgroup import cond, first_warp, when

STEP = 64  # steps of the contraction per stage, and columns of a panel

_STAGING_BUFFERS = 2  # of 64 rows, per consumer warpgroup; they are stored together
_INTERPRETED_CTAS = 2
_SIXTEENTH = 16  # rows: the K of one wgmma instruction
_ROW_BYTES = 128  # of a panel
_UNTILED = plgpu.RefType((plgpu.SwizzleTransform(_ROW_BYTES),))


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile of the result, and stages of the ring buffer."""

    tile_m: int
    tile_n: int
    stages: int = 4


CONFIGS = Config(128, 256), Config(256, 128)


# ---- the two forms -------------------------------------------------------------------------------


@lowered_once("config", "interpret")
def rows_gradient(
    d_outs: Sequence[BFloat16[Array, "M N"]],
    matrices: Sequence[BFloat16[Array, "G N K"]],
    group_sizes: Int[Array, " G"],
    *,
    config: Config | None = None,
    interpret: Any = None,
) -> BFloat16[Array, "M K"]:
    """Returns the sum over all pairs of ``matrices[g(m)].T @ d_outs[m]``, rounded once. N and K are
    multiples of 64. Rows that belong to no group are zero, because the gradient of a gather adds
    them up. The default ``config`` computes the fewest values in vain."""
    (M, N), (G, _, K) = d_outs[0].shape, matrices[0].shape
    if config is None:
        config = min(CONFIGS, key=lambda c: pl.cdiv(K, c.tile_n) * (2 * M / c.tile_m + G))
    operands = *d_outs, *matrices, group_sizes.astype(jnp.int32)
    out_type = jax.ShapeDtypeStruct((M, K), jnp.bfloat16)
    sizes = _Sizes(config, M, G, N, K, len(matrices), False, interpret)
    return _launch("grouped_rows_gradient", sizes, operands, out_type)


@lowered_once("config", "interpret")
def matrices_gradient(
    d_out: BFloat16[Array, "M N"],
    lhs: BFloat16[Array, "M K"],
    group_sizes: Int[Array, " G"],
    *,
    config: Config | None = None,
    interpret: Any = None,
) -> BFloat16[Array, "G N K"]:
    """Returns ``d_out[rows of g].T @ lhs[rows of g]`` for each group. That of no rows is zero, and
    rows that belong to no group are ignored. N, K and ``config`` are as in
    :func:`rows_gradient`."""
    (M, N), K, G = d_out.shape, lhs.shape[1], group_sizes.shape[0]
    if config is None:
        config = min(CONFIGS, key=lambda c: pl.cdiv(N, c.tile_m) * pl.cdiv(K, c.tile_n))
    operands = d_out, lhs, _descending(group_sizes.astype(jnp.int32))
    out_type = jax.ShapeDtypeStruct((G, N, K), jnp.bfloat16)
    sizes = _Sizes(config, M, G, N, K, 1, True, interpret)
    return _launch("grouped_matrices_gradient", sizes, operands, out_type)


def _descending(group_sizes: jax.Array) -> jax.Array:
    """Returns number, first row and size of each group, int32 [3, G], in descending order of size.
    XLA compares all pairs at once, which is faster than a sort."""
    G = group_sizes.shape[0]
    number = jnp.arange(G, dtype=jnp.int32)
    larger = group_sizes[None, :] > group_sizes[:, None]
    before = larger | ((group_sizes[None, :] == group_sizes[:, None]) & (number < number[:, None]))
    position = jnp.sum(before, axis=1)  # of each group
    starts = jnp.cumsum(group_sizes) - group_sizes
    chosen = position[None, :] == number[:, None]
    columns = number, starts, group_sizes
    return jnp.stack([jnp.sum(jnp.where(chosen, x[None, :], 0), axis=1) for x in columns])


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Static parameters of a call."""

    config: Config
    M: int
    G: int
    N: int
    K: int
    pairs: int  # products that the rows gradient adds
    of_matrices: bool  # whether it is the gradient of the matrices
    interpret: Any

    @property
    def on_gpu(self) -> bool:
        return self.interpret is None

    @property
    def ctas(self) -> int:
        return multiprocessors() if self.on_gpu else _INTERPRETED_CTAS

    @property
    def tile_m(self) -> int:
        return self.config.tile_m

    @property
    def tile_n(self) -> int:
        return self.config.tile_n

    @property
    def share(self) -> int:
        """Rows of a tile that one consumer warpgroup computes."""
        return self.tile_m // CONSUMERS

    @property
    def parts(self) -> range:
        """First rows of the wgmma tiles of a share."""
        return range(0, self.share, ROWS)

    @property
    def copies(self) -> int:
        """TMA copies per stage."""
        return self.tile_n // STEP + (self.tile_m // STEP if self.of_matrices else 1)


# ---- tiles ---------------------------------------------------------------------------------------


class _Tile(NamedTuple):
    """A tile of the result."""

    group: jax.Array
    row: jax.Array  # first row: of the tile, or for the matrices gradient of the group
    rows: jax.Array  # rows that belong to the group, from ``row`` on
    column: jax.Array  # first column of the result
    out_row: jax.Array  # first row of the result's matrix; 0 for the rows gradient


@dataclasses.dataclass(frozen=True)
class _RowTiles:
    """Tiles of the rows gradient, in the order of the forward kernel."""

    scheduler: TileScheduler
    rows: jax.Array  # of all groups

    @classmethod
    def of(cls, sizes: _Sizes, group_sizes: Any) -> _RowTiles:
        tiles = GroupTiles(group_sizes, sizes.tile_m, on_gpu=sizes.on_gpu)
        rows = dataclasses.replace(tiles, tile_m=1).count()
        panel = panel_height(sizes.M, sizes.G, sizes.tile_m, 2 * sizes.N * sizes.pairs)
        columns = sizes.K, sizes.tile_n
        count = tiles.count()
        cta = lax.axis_index("cta")
        return cls(TileScheduler(tiles, count, *columns, panel, sizes.ctas, cta), rows)

    def count(self) -> jax.Array:
        return self.scheduler.count()

    def locate(self, i: jax.Array | int) -> _Tile:
        tile = self.scheduler.locate(i)
        return _Tile(tile.group, tile.row, tile.rows, tile.first_new_column, jnp.int32(0))


@dataclasses.dataclass(frozen=True)
class _MatrixTiles:
    """Tiles of the matrices gradient: those of one group after the other, the largest first."""

    sizes: _Sizes
    groups: Any  # result of :func:`_descending` in global memory

    @property
    def per_group(self) -> tuple[int, int]:
        """Tiles along N and along K."""
        return pl.cdiv(self.sizes.N, self.sizes.tile_m), pl.cdiv(self.sizes.K, self.sizes.tile_n)

    def count(self) -> jax.Array:
        rounds, rest = divmod(self.sizes.G * math.prod(self.per_group), self.sizes.ctas)
        return rounds + jnp.where(self._position(rounds) < rest, 1, 0)

    def _position(self, i: Any) -> jax.Array:
        """Returns the CTA's position in the i-th round."""
        cta = lax.axis_index("cta")
        return jnp.where(jnp.asarray(i & 1, jnp.int32) == 1, self.sizes.ctas - 1 - cta, cta)

    def locate(self, i: jax.Array | int) -> _Tile:
        tall, wide = map(jnp.int32, self.per_group)
        tile = i * jnp.int32(self.sizes.ctas) + self._position(i)
        rank = lax.div(tile, tall * wide)
        tile = tile - rank * (tall * wide)
        n_tile = lax.div(tile, tall)
        m_tile = tile - n_tile * tall
        rank = jnp.minimum(rank, self.sizes.G - 1)  # there is none past the last tile
        group, row, rows = (self.groups[i, rank] for i in range(3))
        column = n_tile * jnp.int32(self.sizes.tile_n)
        return _Tile(group, row, rows, column, m_tile * jnp.int32(self.sizes.tile_m))


# ---- launch and roles ----------------------------------------------------------------------------


class _Memory(NamedTuple):
    """References to everything that the kernel reads and writes, except the ring's barriers."""

    # in global memory
    lefts: tuple[Any, ...]  # d_out of each pair
    rights: tuple[Any, ...]  # the matrices of each pair, or lhs
    out: Any
    left_stages: Any  # rows of d_out [stages, tile_m, 64], or panels [stages, tile_m / 64, 64, 64]
    right_stages: Any  # panels [stages, tile_n / 64, 64, 64]
    staging: Any  # tiled [CONSUMERS * 2, 64, 64]: results on their way out
    staging_untiled: Any


def _launch(name: str, sizes: _Sizes, operands: Sequence[jax.Array], out_type: Any) -> jax.Array:
    config, interpret, on_gpu = sizes.config, sizes.interpret, sizes.on_gpu
    ring_scratch = Ring.scratch(config.stages, sizes.copies, CONSUMERS, interpret)

    def body(*refs: Any) -> None:
        pairs = sizes.pairs
        lefts, rights, groups = refs[:pairs], refs[pairs : 2 * pairs], refs[2 * pairs]
        out, left_stages, right_stages, staging, *barriers = refs[2 * pairs + 1 :]
        staging, untiled = staging if on_gpu else (staging, staging)
        memory = _Memory(lefts, rights, out, left_stages, right_stages, staging, untiled)
        ring = Ring.of(config.stages, CONSUMERS, barriers, interpret)
        ring.initialise()
        make = _MatrixTiles if sizes.of_matrices else _RowTiles.of
        tiles = make(sizes, groups)
        warpgroup = lax.axis_index("wg")

        @when(warpgroup == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            when(first_warp(on_gpu))(lambda: _produce(sizes, memory, tiles, ring))

        @when(warpgroup != CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            _Consumer(sizes, memory, tiles, ring, warpgroup).run()

    body.__name__ = name  # profiles show it

    def stages(*shape: int) -> Any:
        swizzle = (plgpu.SwizzleTransform(_ROW_BYTES),)
        shape = config.stages, *shape, STEP
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzle if on_gpu else ())

    left = (sizes.tile_m // STEP, STEP) if sizes.of_matrices else (sizes.tile_m,)
    staging = CONSUMERS * _STAGING_BUFFERS, ROWS, STEP
    kernel = grid_kernel(
        body,
        out_type,
        [
            stages(*left),
            stages(sizes.tile_n // STEP, STEP),
            two_views(staging, jnp.bfloat16, on_gpu=on_gpu),
            *ring_scratch,
        ],
        warpgroups=CONSUMERS + 1,
        grid={"cta": sizes.ctas},
        interpret=interpret,
        lowering_semantics=LANE,
    )
    return kernel(*operands)


def _produce(sizes: _Sizes, memory: _Memory, tiles: _RowTiles | _MatrixTiles, ring: Ring) -> None:
    """Copies the operands of every step of this CTA's tiles to the ring. One warp calls it."""
    options: Any = {"tiled": False, "swizzle": _ROW_BYTES}

    def panels(source: Any, before: Any, first: Any, count: int, width: int, stages: Any) -> list:
        """Copies panels from column ``first`` of ``width`` on. Past the last column, where nothing
        is stored, the last panel is repeated."""
        columns = [jnp.minimum(first + j * STEP, width - STEP) for j in range(count)]
        height = before[-1].size
        targets = [stages.at[j] if height == STEP else stages.at[j, pl.ds(0, height)]
                   for j in range(count)]  # fmt: skip
        windows = [(*before, pl.ds(column, STEP)) for column in columns]
        return [
            TmaCopy(source, window, target, **options)
            for window, target in zip(windows, targets, strict=True)
        ]

    def copy_tile(i: jax.Array, state: PipelineState) -> PipelineState:
        tile = tiles.locate(i)
        for left, right in zip(memory.lefts, memory.rights, strict=True):

            def fill(
                step: jax.Array,
                state: PipelineState,
                carry: tuple[()],
                left: Any = left,
                right: Any = right,
            ) -> tuple[()]:
                lefts = memory.left_stages.at[state.stage]
                rights, count = memory.right_stages.at[state.stage], sizes.tile_n // STEP
                first = step * jnp.int32(STEP)
                if sizes.of_matrices:
                    rows = (pl.ds(tile.row + first, min(STEP, sizes.M)),)
                    m_panels = sizes.tile_m // STEP
                    copies = panels(left, rows, tile.out_row, m_panels, sizes.N, lefts)
                    copies += panels(right, rows, tile.column, count, sizes.K, rights)
                else:
                    k, height = pl.ds(first, STEP), min(sizes.tile_m, sizes.M)
                    target = lefts if height == sizes.tile_m else lefts.at[pl.ds(0, height)]
                    copies = [TmaCopy(left, (pl.ds(tile.row, height), k), target, **options)]
                    window = tile.group, k
                    copies += panels(right, window, tile.column, count, sizes.K, rights)
                ring.fill(state, copies)
                return carry

            steps = _steps(tile.rows) if sizes.of_matrices else sizes.N // STEP
            state, _ = ring.loop(steps, fill, state, ())
        return state

    ring.drain(lax.fori_loop(0, tiles.count(), copy_tile, ring.start()))


def _steps(rows: jax.Array) -> jax.Array:
    return lax.div(rows + (STEP - 1), jnp.int32(STEP))


_Sums = tuple[jax.Array, ...]
"""Float32 sums [64, tile_n] of a warpgroup's share of a tile, one above the other."""


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """A consumer warpgroup, which computes and stores its share of every tile of its CTA."""

    sizes: _Sizes
    memory: _Memory
    tiles: _RowTiles | _MatrixTiles
    ring: Ring
    warpgroup: jax.Array

    def run(self) -> None:
        self.ring.release_all()
        bases: tuple[Any, Any] = (None, None)
        if self.sizes.on_gpu:
            offset = self.warpgroup * jnp.int32(self.sizes.share * _ROW_BYTES)
            left = wgmma.operand_base(self.memory.left_stages, offset)
            bases = left, wgmma.operand_base(self.memory.right_stages, 0)

        def compute_tile(i: jax.Array, carry: Any) -> Any:
            tile, state = carry
            multiply = self.sum_rows if self.sizes.of_matrices else self.sum_columns
            sums, next_tile, state = multiply(i, tile, state, bases)
            self.store(tile, sums)
            return next_tile, state

        carry = self.tiles.locate(0), self.ring.start()
        lax.fori_loop(0, self.tiles.count(), compute_tile, carry)
        if isinstance(self.tiles, _RowTiles):
            self.zero_rows_past(self.tiles.rows)
        plgpu.wait_smem_to_gmem(0)

    # ---- main loops ----

    def sum_columns(self, i: Any, tile: _Tile, state: PipelineState, bases: Any) -> Any:
        """Sums the rows gradient over N. The next tile is located in the first step, because that
        takes half a microsecond."""

        def step(k: jax.Array, state: PipelineState, carry: Any) -> Any:
            sums, previous, next_tile = carry
            self.ring.wait_full(state)
            sums = self.multiply(state, sums, bases)
            next_tile = cond(k == 0, lambda: self.tiles.locate(i + 1), lambda: next_tile)
            self.release_previous(k, previous)
            return sums, state, next_tile

        steps = self.sizes.pairs * self.sizes.N // STEP
        carry = self.zeros(), state, tile
        end, (sums, last, next_tile) = self.ring.loop(steps, step, state, carry)
        sums = self.complete(sums)
        self.ring.release(last)
        return sums, next_tile, end

    def sum_rows(self, i: Any, tile: _Tile, state: PipelineState, bases: Any) -> Any:
        """Sums the matrices gradient over the group's rows: whole steps, then what is left."""
        next_tile = self.tiles.locate(i + 1)

        def step(k: jax.Array, state: PipelineState, carry: Any) -> Any:
            sums, previous = carry
            self.ring.wait_full(state)
            sums = self.multiply(state, sums, bases)
            self.release_previous(k, previous)
            return sums, state

        whole = lax.div(tile.rows, jnp.int32(STEP))
        left = tile.rows - whole * STEP
        state, (sums, last) = self.ring.loop(whole, step, state, (self.zeros(), state))

        @when(left > 0)
        def _() -> None:
            self.ring.wait_full(state)
            self.zero_rows_from(state, left)

        if self.sizes.on_gpu:
            sixteenths = lax.div(left + (_SIXTEENTH - 1), jnp.int32(_SIXTEENTH))
            add = lambda n, sums: self.multiply(state, sums, bases, sixteenth=n)  # noqa: E731
            sums = lax.fori_loop(0, sixteenths, add, sums)
        else:
            sums = self.multiply(state, sums, bases, rows=left)
        sums = self.complete(sums)
        when(whole > 0)(lambda: self.ring.release(last))
        when(left > 0)(lambda: self.ring.release(state))
        after = self.ring.next(state)
        end = (jnp.where(left > 0, new, old) for new, old in zip(after, state, strict=True))
        return sums, next_tile, PipelineState(*end)

    def zeros(self) -> _Sums:
        return tuple(zeros(self.sizes.tile_n) for _ in self.sizes.parts)

    def multiply(
        self,
        state: PipelineState,
        sums: _Sums,
        bases: Any,
        *,
        sixteenth: Any = None,
        rows: Any = None,
    ) -> _Sums:
        """Starts the product of a stage; in the interpreter it is complete. ``sixteenth`` (on a
        GPU) or ``rows`` (in the interpreter) is the part of the stage's rows to multiply."""
        sizes = self.sizes
        if not sizes.on_gpu:
            return self._interpret(state, sums, rows)
        unit, depth = _ROW_BYTES // 16, STEP  # the bases count 16 bytes
        left = bases[0] + state.stage * jnp.int32(sizes.tile_m * unit)
        right = bases[1] + state.stage * jnp.int32(sizes.tile_n * unit)
        if sixteenth is not None:
            offset, depth = sixteenth * jnp.int32(_SIXTEENTH * unit), _SIXTEENTH
            left, right = left + offset, right + offset
        return tuple(
            wgmma.add_bfloat16_product(
                left + jnp.int32(part * unit) if part else left,
                right,
                value,
                transposed_a=sizes.of_matrices,
                depth=depth,
            )
            for part, value in zip(sizes.parts, sums, strict=True)
        )

    def _interpret(self, state: PipelineState, sums: _Sums, rows: Any) -> _Sums:
        sizes, memory = self.sizes, self.memory
        panels = [memory.right_stages[state.stage, j] for j in range(sizes.tile_n // STEP)]
        right, products = jnp.concatenate(panels, axis=1).astype(jnp.float32), []
        inside = True if rows is None else jnp.arange(STEP)[:, None] < rows
        for part, value in zip(sizes.parts, sums, strict=True):
            first = self.warpgroup * jnp.int32(sizes.share) + part
            if sizes.of_matrices:
                panel = memory.left_stages[state.stage, lax.div(first, jnp.int32(STEP))]
                left = jnp.where(inside, panel.astype(jnp.float32), 0).T
                product = jnp.dot(left, jnp.where(inside, right, 0))
            else:
                left = memory.left_stages[state.stage, pl.ds(first, ROWS)]
                product = jnp.dot(left.astype(jnp.float32), right)
            products.append(value + product)
        return tuple(products)

    def release_previous(self, step: jax.Array, previous: PipelineState) -> None:
        """Waits for the products of the previous stage, and releases it."""
        if self.sizes.on_gpu:
            plgpu.wgmma_wait(len(self.sizes.parts))
        when(step > 0)(lambda: self.ring.release(previous))

    def complete(self, sums: _Sums) -> _Sums:
        return tuple(map(wgmma.wait_for_product, sums)) if self.sizes.on_gpu else sums

    def zero_rows_from(self, state: PipelineState, first: jax.Array) -> None:
        """Zeroes the stage's rows from ``first`` to the end of its sixteenth, in this warpgroup's
        panels of d_out and in all of lhs. The other warpgroup may write the same zeros."""
        sizes = self.sizes
        if not sizes.on_gpu:
            return
        parts = sizes.share // STEP
        lefts = [self.warpgroup * jnp.int32(parts) + jnp.int32(j) for j in range(parts)]
        panels = [self.memory.left_stages.at[state.stage, j] for j in lefts]
        panels += [self.memory.right_stages.at[state.stage, j] for j in range(sizes.tile_n // STEP)]
        rows = -first & (_SIXTEENTH - 1)

        @inline([_UNTILED for _ in panels], SCALAR, SCALAR)
        def write(panels: Any, first: Any, rows: Any) -> None:
            # At most 15 rows of 128 bytes: fewer than 128 threads write 16 bytes each.
            thread = arith.andi(mgpu.utils.thread_idx(), const(127))
            end = arith.muli(value_of(rows), const(_ROW_BYTES // 16))
            offset = arith.muli(value_of(first), const(_ROW_BYTES))
            offset = arith.addi(offset, arith.muli(thread, const(16)))
            for panel in panels:
                address = arith.addi(shared_address(panel), offset)
                text = """{
                    .reg .pred p;
                    .reg .b32 zero;
                    mov.b32 zero, 0;
                    setp.lt.u32 p, $1, $2;
                    @p st.shared.v4.b32 [$0], {zero, zero, zero, zero};
                }"""
                instruction(text, address, thread, end)

        write(panels, first, rows)
        plgpu.commit_smem()  # the tensor cores see the zeros of all threads

    # ---- epilogue ----

    def store(self, tile: _Tile, sums: _Sums) -> None:
        """Rounds a warpgroup's share to bfloat16, and stores what belongs to the result."""
        sizes, memory = self.sizes, self.memory
        buffers = _STAGING_BUFFERS
        values = [x.astype(jnp.bfloat16) for x in sums]
        corners = [(r, c) for r in sizes.parts for c in range(0, sizes.tile_n, STEP)]
        first_row = self.warpgroup * jnp.int32(sizes.share)
        for n in range(0, len(corners), buffers):
            batch = list(enumerate(corners[n : n + buffers]))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for j, (r, c) in batch:
                index = self.warpgroup * jnp.int32(buffers) + jnp.int32(j)
                memory.staging[index] = values[r // ROWS][:, c : c + STEP]
            plgpu.commit_smem()
            for j, (r, c) in batch:
                index = self.warpgroup * jnp.int32(buffers) + jnp.int32(j)
                staged, row = memory.staging_untiled.at[index], first_row + r
                column, columns = tile.column + c, pl.ds(tile.column + c, STEP)
                if not sizes.of_matrices:
                    count = jnp.clip(tile.rows - row, 0, ROWS)
                    count = jnp.where(column < sizes.K, count, 0)
                    store_rows(staged, memory.out, count, tile.row + row, columns)
                    continue

                @when((tile.out_row + row < sizes.N) & (column < sizes.K))
                def _(staged: Any = staged, row: Any = row, columns: Any = columns) -> None:
                    window = tile.group, pl.ds(tile.out_row + row, ROWS), columns
                    plgpu.copy_smem_to_gmem(staged, memory.out.at[window])

    def zero_rows_past(self, rows: jax.Array) -> None:
        """Stores zeros to the rows that belong to no group. All warpgroups share them."""
        sizes, memory = self.sizes, self.memory
        index = self.warpgroup * jnp.int32(_STAGING_BUFFERS)
        worker = lax.axis_index("cta") * jnp.int32(CONSUMERS) + self.warpgroup
        workers = sizes.ctas * CONSUMERS
        height = workers * ROWS  # rows of one round

        def store(i: jax.Array, carry: tuple[()]) -> tuple[()]:
            row = rows + (i * jnp.int32(workers) + worker) * ROWS
            count = jnp.clip(sizes.M - row, 0, ROWS)

            def store_panel(n: jax.Array, carry: tuple[()]) -> tuple[()]:
                staged, columns = memory.staging_untiled.at[index], pl.ds(n * STEP, STEP)
                store_rows(staged, memory.out, count, row, columns)
                return carry

            return lax.fori_loop(0, sizes.K // STEP, store_panel, carry)

        @when(rows < sizes.M)
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            memory.staging[index] = zeros(STEP).astype(jnp.bfloat16)
            plgpu.commit_smem()
            rounds = lax.div(sizes.M - rows + (height - 1), jnp.int32(height))
            lax.fori_loop(0, rounds, store, ())
