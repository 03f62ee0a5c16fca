"""The Hopper kernel of grouped_matmul: one persistent block a multiprocessor.

    out[r] = rhs[g(r)] @ lhs[r]      bfloat16, or float8 with a scale a row and 128 columns of lhs
                                     and a scale a 128 x 128 block of rhs
    out[r] = silu(gate[g(r)] @ lhs[r]) * (up[g(r)] @ lhs[r])     of two such matrices a group,
                                     bfloat16, or float8 with a scale a row and 128 columns

Three warpgroups share a block. One copies: it walks the block's tiles and keeps a ring of stages
filled, each with 128 bytes of K of the tile's rows and of its columns. Two multiply, each its half
of the tile, and write the result out through a staging buffer by TMA.

Five things are not obvious.

1.  A tiled TMA copy starts at multiples of eight rows only, and groups start anywhere. A tile one
    swizzle atom wide, 128 bytes, has the same bytes as a plain array [rows, 128 bytes] under that
    swizzle; a ``RefUnion`` names both: copies use the plain name, products the tiled one.
2.  A tile's rows past its group's end are the next group's, or zeros past the array's. They are
    multiplied like the others and not stored: rows of a product do not mix.
3.  float8 products are summed over 128 of K by the tensor cores, then scaled and added to float32
    sums in registers.
4.  Of two matrices a tile holds as many columns of each, side by side within a warpgroup's part:
    one product serves both, and what belongs together ends in the same registers.
5.  An H200 multiplies faster than its power allows for long, so that what counts beside waiting is
    what is done besides: one warp copies; between two float8 products nothing is left to do but
    to add them up; what a step reads beyond its tiles is loaded under its product.

What was tried, and how fast it was, stands in benchmarks/NOTES.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.grouped_matmul.epilogue import (
    Halves,
    gated,
    quantized,
    store_rows,
    store_scales,
)
from pallas_kernels.grouped_matmul.ring import (
    Copy,
    LeaderBarriers,
    PallasBarriers,
    Position,
    Ring,
)
from pallas_kernels.grouped_matmul.row_scales import row_scales
from pallas_kernels.grouped_matmul.row_tiles import RowTiles
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.mosaic_ir import first_warp

SCALE_BLOCK = 128
_ATOM = 128  # bytes: a row of a swizzled tile
_MULTIPLIERS = 2  # warpgroups that multiply
_INTERPRETED_BLOCKS = 2
_PANEL_BYTES = 16 * 2**20  # of 50 MB of L2 cache
_COPIER = 2  # the warpgroup that copies
_EXTRA_SCALES = 32


@dataclasses.dataclass(frozen=True)
class Config:
    """How a block computes a tile of the result."""

    rows: int
    columns: int
    stages: int
    split: Literal["rows", "columns"]
    """What the two multiplying warpgroups share out."""
    slots: int = 1
    """Staging buffers of 64 rows a warpgroup: what is written at once."""
    panel: int | None = None
    """Row tiles that are visited for a column tile before the next column tile; None for as many
    as the L2 cache holds well beside the matrices that pass."""
    classes: tuple[int, ...] = ()
    """Rows that are copied of a tile: the least of these that holds its group's, else all."""
    copied_scales: bool = False
    """float8: the rows' scales come by TMA, for which they are transposed beforehand. Worth that
    kernel where there are many rows: read from where they are, they do not stay in the L1 cache."""
    early: bool = False
    """The block starts, and gets its barriers ready, while the kernel before it ends."""
    registers: tuple[int, int] = (232, 40)
    """Of a thread that multiplies, of one that copies."""
    blocks: int | None = None
    """Of the grid; None for one a multiprocessor."""


class Tile(NamedTuple):
    group: jax.Array
    row: jax.Array
    rows: jax.Array
    column: jax.Array
    """Where the tile starts; it may reach back over columns of the tile before it."""
    new: jax.Array
    """The first column that no other tile writes."""


class _Refs(NamedTuple):
    lhs: Any
    matrices: tuple[Any, ...]
    tiles: RowTiles
    row_tiles: jax.Array
    """How many there are."""
    lhs_scale: Any
    matrix_scales: tuple[Any, ...]
    out: Any
    scale_out: Any
    """Of a quantized result."""
    a: Any
    """[stages, rows, atom], tiled."""
    a_plain: Any
    b: Any
    b_plain: Any
    scales: Any
    """[stages, scale rows], where they are copied."""
    staging: Any
    staging_plain: Any
    halves: Halves | None
    """Of a quantized result whose blocks lie in both warpgroups' parts."""
    block: jax.Array
    """This block's number."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is known when the kernel is traced."""

    config: Config
    M: int
    N: int
    K: int
    float8: bool
    matrices: int
    quantize: bool
    blocks: int
    on_gpu: bool
    """Not interpreted."""

    @property
    def copied_scales(self) -> bool:
        return self.float8 and self.config.copied_scales

    @property
    def scale_rows(self) -> int:
        """That are copied: from a multiple of four on, and so many that 128 divides their bytes."""
        return self.config.rows + _EXTRA_SCALES

    @property
    def atom(self) -> int:
        """Elements of K that a swizzle atom holds."""
        return _ATOM if self.float8 else _ATOM // 2

    @property
    def steps(self) -> int:
        return self.K // self.atom

    @property
    def columns(self) -> int:
        """Of the result, in a tile."""
        return self.config.columns // self.matrices

    @property
    def column_tiles(self) -> int:
        return pl.cdiv(self.N, self.columns)

    @property
    def part(self) -> tuple[int, int]:
        """(rows, columns) of a tile that one warpgroup multiplies."""
        rows, columns = self.config.rows, self.config.columns
        return (rows // 2, columns) if self.config.split == "rows" else (rows, columns // 2)

    @property
    def scaled(self) -> int:
        """Columns of a warpgroup's part that always lie under one scale."""
        width = self.part[1] // self.matrices
        aligned = self.columns % SCALE_BLOCK == 0 and self.N % SCALE_BLOCK == 0
        whole = width == SCALE_BLOCK and aligned
        return width if whole else self.staged

    @property
    def staged(self) -> int:
        """Columns of a staging buffer. Stores start at even rows, or take them from the first on,
        so that 64 bytes a row suffice: TMA reads shared memory from multiples of 128."""
        if self.quantize:
            return self.part[1] // self.matrices
        return 32 if self.columns % 64 else 64

    @property
    def halves(self) -> bool:
        """Whether a block of a quantized result lies in both warpgroups' parts."""
        return self.quantize and self.config.split == "columns"

    @property
    def panel(self) -> int:
        tile_bytes = self.config.rows * self.steps * _ATOM
        return self.config.panel or max(1, _PANEL_BYTES // tile_bytes)

    @property
    def copied_rows(self) -> tuple[int, ...]:
        """The classes, ascending; the last holds every tile's rows."""
        most = min(self.config.rows, self.M)
        return *(rows for rows in self.config.classes if rows < most), most

    @property
    def pieces(self) -> list[tuple[int, int, int, int]]:
        """Of a stage's columns: which matrix, from which column of the tile of the result, how
        many, to which row of the stage."""
        parts = 1 if self.config.split == "rows" else _MULTIPLIERS
        width = self.part[1] // self.matrices
        if self.matrices == 1:
            parts, width = 1, self.columns
        return [
            (matrix, part * width, width, (part * self.matrices + matrix) * width)
            for part in range(parts)
            for matrix in range(self.matrices)
        ]

    def offsets(self, warpgroup: jax.Array) -> tuple[Any, Any]:
        """First row and column of a warpgroup's part of the tile."""
        rows, columns = self.part
        if self.config.split == "rows":
            return pl.multiple_of(warpgroup * jnp.int32(rows), 64), 0
        return 0, pl.multiple_of(warpgroup * jnp.int32(columns), 64)

    def out_column(self, warpgroup: jax.Array) -> Any:
        """First column of the result that a warpgroup's part gives, in the tile."""
        if self.config.split == "rows":
            return 0
        return pl.multiple_of(warpgroup * jnp.int32(self.part[1] // self.matrices), 64)


def check_shapes(config: Config, N: int, K: int, float8: bool, matrices: int = 1) -> None:
    """Raises NotImplementedError where ``config`` does not fit."""
    atom = _ATOM if float8 else _ATOM // 2
    columns = config.columns // matrices
    if K % atom or N % 64 or columns > N:
        raise NotImplementedError(
            f"a tile of {columns} columns takes at least as many, in multiples of 64, and"
            f" multiples of {atom} of K, got N {N} and K {K}"
        )
    if matrices > 1 and columns % (32 if config.split == "rows" else 128):
        raise NotImplementedError(
            f"two matrices take multiples of 32 or, split, of 128 columns, got {columns}"
        )
    if float8 and config.split == "rows" and config.rows != 128:
        raise NotImplementedError(f"float8 takes 64 rows a warpgroup, got {config.rows // 2}")


def quantizes(config: Config, N: int, matrices: int = 1) -> bool:
    """Whether each tile holds one block of 128 columns of the result, 64 rows a warpgroup."""
    rows = config.rows // 2 if config.split == "rows" else config.rows
    return rows == 64 and config.columns // matrices == SCALE_BLOCK and N % SCALE_BLOCK == 0


def grouped_product(
    lhs: Float[Array, "M K"],
    matrices: Sequence[Float[Array, "G N K"]],
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None,
    matrix_scales: Sequence[Float32[Array, "G Nb Kb"]],
    *,
    config: Config,
    interpret: Any = None,
) -> BFloat16[Array, "M N"]:
    """The product of every row with its group's matrix, or of two silu of the first times the
    second; rows of no group are undefined.

    Args:
      lhs, matrices: all bfloat16, or all float8_e4m3fn; one matrix or two.
      lhs_scale, matrix_scales: of float8; one array a matrix.
    """
    arrays = lhs, matrices, group_sizes, lhs_scale, matrix_scales
    return _product(*arrays, config=config, quantize=False, interpret=interpret)


def quantized_product(
    lhs: Float[Array, "M K"],
    matrices: Sequence[Float[Array, "G N K"]],
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None,
    matrix_scales: Sequence[Float32[Array, "G Nb Kb"]],
    *,
    config: Config,
    interpret: Any = None,
) -> tuple[Float[Array, "M N"], Float32[Array, "M Nb"]]:
    """:func:`grouped_product` in float8_e4m3fn, and the scales of its rows by 128 columns.

    Raises:
      NotImplementedError: :func:`quantizes` says no.
    """
    N, count = matrices[0].shape[1], len(matrices)
    if not quantizes(config, N, count):
        raise NotImplementedError(
            f"quantizes tiles of 64 x {SCALE_BLOCK}, or 128 x {SCALE_BLOCK} split by rows, of"
            f" multiples of {SCALE_BLOCK} columns, got {config} and N {N}"
        )
    arrays = lhs, matrices, group_sizes, lhs_scale, matrix_scales
    return _product(*arrays, config=config, quantize=True, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("config", "quantize", "interpret"))
def _product(
    lhs: jax.Array,
    matrices: Sequence[jax.Array],
    group_sizes: jax.Array,
    lhs_scale: jax.Array | None,
    matrix_scales: Sequence[jax.Array],
    *,
    config: Config,
    quantize: bool,
    interpret: Any,
) -> Any:
    (M, K), (_, N, _) = lhs.shape, matrices[0].shape
    float8, count = lhs_scale is not None, len(matrices)
    check_shapes(config, N, K, float8, count)
    # The interpreter keeps a RefUnion's members apart, knows Pallas' barriers only, and makes a
    # thread of this machine of each of a block's warpgroups.
    aliased = interpret is None
    blocks = config.blocks or (multiprocessors() if aliased else _INTERPRETED_BLOCKS)
    plan = _Plan(config, M, N, K, float8, count, quantize, blocks, aliased)
    copied_scales = plan.copied_scales
    if lhs_scale is not None and copied_scales:
        spare = max(-M % 4, plan.scale_rows - M)
        lhs_scale = jnp.pad(lhs_scale, ((0, spare), (0, 0))).T
    early = config.early and aliased and hasattr(plgpu, "griddepcontrol_wait")  # not in jax 0.10

    def grouped_matmul(*refs: Any) -> None:
        remaining = iter(refs)
        lhs = next(remaining)
        matrices = tuple(next(remaining) for _ in range(count))
        tiles = RowTiles(next(remaining), config.rows, on_gpu=aliased)
        lhs_scale = next(remaining) if float8 else None
        matrix_scales = tuple(next(remaining) for _ in range(count if float8 else 0))
        out = next(remaining)
        scale_out = next(remaining) if quantize else None
        a, b = (next(remaining) for _ in range(2))
        scales = next(remaining) if copied_scales else None
        staging = next(remaining)
        halves = Halves(*(next(remaining) for _ in range(2))) if plan.halves else None
        (barriers,) = remaining
        ring: Ring = (LeaderBarriers if aliased else PallasBarriers)(config.stages, barriers)
        ring.initialise()
        if early:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()  # nothing is read before
        both = (lambda ref: ref) if aliased else (lambda ref: (ref, ref))
        arrays = lhs, matrices, tiles, tiles.total(), lhs_scale, matrix_scales, out, scale_out
        block = lax.axis_index("block")
        named = _Refs(*arrays, *both(a), *both(b), scales, *both(staging), halves, block)  # pyright: ignore[reportCallIssue]
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _COPIER)
        def _() -> None:
            plgpu.set_max_registers(config.registers[1], action="decrease")
            pl.when(first_warp(aliased))(lambda: _copy(plan, named, ring))

        @pl.when(warpgroup != _COPIER)
        def _() -> None:
            plgpu.set_max_registers(config.registers[0], action="increase")
            _multiply(plan, named, ring, warpgroup)

    def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
        width = shape[-1] * jnp.dtype(dtype).itemsize
        swizzle = plgpu.SwizzleTransform(width)
        tiling = plgpu.TilingTransform((8, shape[-1]))
        tiled = plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))
        if not aliased:
            return tiled
        return plgpu.RefUnion(tiled, plgpu.SMEM(shape, dtype, transforms=(swizzle,)))

    out_type = jax.ShapeDtypeStruct((M, N), FLOAT8 if quantize else jnp.bfloat16)
    scale_type = jax.ShapeDtypeStruct((M, N // SCALE_BLOCK), jnp.float32)
    stages, copies = config.stages, 1 + len(plan.pieces) + plan.copied_scales
    scratch: list[Any] = [
        swizzled((stages, config.rows, plan.atom), lhs.dtype),
        swizzled((stages, config.columns, plan.atom), matrices[0].dtype),
        *([plgpu.SMEM((stages, plan.scale_rows), jnp.float32)] if copied_scales else []),
        swizzled((_MULTIPLIERS * config.slots, 64, plan.staged), out_type.dtype),
        *(Halves.scratch() if plan.halves else []),
        (LeaderBarriers if aliased else PallasBarriers).scratch(stages, copies),
    ]
    if count == 2:  # profiles show the name
        grouped_matmul.__name__ = "grouped_swiglu"
    kernel = plgpu.kernel(
        grouped_matmul,
        out_type=(out_type, scale_type) if quantize else out_type,
        scratch_types=scratch,
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=_MULTIPLIERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(lhs, *matrices, group_sizes, *((lhs_scale, *matrix_scales) if float8 else ()))


def _locate(plan: _Plan, refs: _Refs, i: jax.Array | int) -> Tile:
    """This block's i-th tile; past the last, one without rows."""
    column_tiles = jnp.int32(plan.column_tiles)
    tile = refs.block + i * jnp.int32(plan.blocks)
    if plan.panel == 1:
        row_tile = lax.div(tile, column_tiles)
        column_tile = tile - row_tile * column_tiles
    else:
        panel, row_tiles = jnp.int32(plan.panel), refs.row_tiles
        in_panel = panel * column_tiles
        first = lax.div(tile, in_panel) * panel
        tile = lax.rem(tile, in_panel)
        width = jnp.maximum(jnp.minimum(panel, row_tiles - first), 1)
        column_tile = lax.div(tile, width)
        row_tile = first + tile - column_tile * width
    new = column_tile * jnp.int32(plan.columns)
    return Tile(*refs.tiles.locate(row_tile), jnp.minimum(new, plan.N - plan.columns), new)


def _my_tiles(plan: _Plan, refs: _Refs) -> jax.Array:
    blocks, total = jnp.int32(plan.blocks), refs.row_tiles * plan.column_tiles
    return lax.div(total - refs.block + (blocks - 1), blocks)


def _copy(plan: _Plan, refs: _Refs, ring: Ring) -> None:
    """Fills the ring with the stages of all of this block's tiles."""
    config, atom = plan.config, plan.atom

    def copy_stage(tile: Tile, step: Any, at: Position, rows: int) -> None:
        k = pl.ds(step * jnp.int32(atom), atom)
        copies = []
        for matrix, column, width, to in plan.pieces:
            b = refs.b_plain.at[at.slot]
            if width < config.columns:
                b = refs.b_plain.at[at.slot, pl.ds(to, width)]
            window = (tile.group, pl.ds(tile.column + column, width), k)
            copies.append(Copy(refs.matrices[matrix], window, b, _ATOM))
        a = refs.a_plain.at[at.slot]
        if rows < config.rows:
            a = refs.a_plain.at[at.slot, pl.ds(0, rows)]
        copies.append(Copy(refs.lhs, (pl.ds(tile.row, rows), k), a, _ATOM))
        if plan.copied_scales:
            window = (step, pl.ds(tile.row - (tile.row & 3), plan.scale_rows))
            copies.append(Copy(refs.lhs_scale, window, refs.scales.at[at.slot], None))
        ring.fill(at, copies)

    def copy_tile(i: jax.Array, at: Position) -> Position:
        tile = _locate(plan, refs, i)

        def fill(step: jax.Array, at: Position, carry: tuple[()]) -> tuple[()]:
            fewer = 0
            for rows in plan.copied_rows:
                last = rows == plan.copied_rows[-1]
                if last and not fewer:
                    copy_stage(tile, step, at, rows)
                else:
                    mine = (tile.rows > fewer) & ((tile.rows <= rows) | last)
                    pl.when(mine)(functools.partial(copy_stage, tile, step, at, rows))
                fewer = rows
            return carry

        return ring.walk(plan.steps, fill, at, ())[0]

    ring.drain(lax.fori_loop(0, _my_tiles(plan, refs), copy_tile, ring.begin()))


def _multiply(plan: _Plan, refs: _Refs, ring: Ring, warpgroup: jax.Array) -> None:
    """Multiplies this warpgroup's part of each of the block's tiles, and stores it."""
    ring.release_all()
    product = _float8_tile if plan.float8 else _bfloat16_tile

    def multiply_tile(i: jax.Array, carry: Any) -> Any:
        tile, scales, at = carry

        def find_after(step: jax.Array, after: Tile) -> Tile:
            """Once a tile, under the first of its products: half a microsecond."""
            return lax.cond(step == 0, lambda: _locate(plan, refs, i + 1), lambda: after)

        sums, after, at = product(plan, refs, ring, warpgroup, tile, find_after, scales, at)
        scales = first_scales(after)  # while this tile is stored
        _store(plan, refs, warpgroup, tile, sums, i)
        return after, scales, at

    def first_scales(tile: Tile) -> _Scales | None:
        return _load_scales(plan, refs, warpgroup, tile, 0) if plan.float8 else None

    first = _locate(plan, refs, 0)
    carry = first, first_scales(first), ring.begin()
    lax.fori_loop(0, _my_tiles(plan, refs), multiply_tile, carry)
    plgpu.wait_smem_to_gmem(0)


def _bfloat16_tile(
    plan: _Plan,
    refs: _Refs,
    ring: Ring,
    warpgroup: jax.Array,
    tile: Tile,
    find_after: Callable[[jax.Array, Tile], Tile],
    scales: None,
    at: Position,
) -> tuple[tuple[jax.Array], Tile, Position]:
    """The part's sums, in one array, and the tile after this one."""
    del scales
    row, column = plan.offsets(warpgroup)
    rows, columns = plan.part

    def sum_up(accumulator: Any) -> tuple[jax.Array, Tile, Position]:
        def step(i: jax.Array, at: Position, carry: tuple[Position, Tile]) -> Any:
            before, after = carry
            ring.wait_full(at)
            a = refs.a.at[at.slot, pl.ds(row, rows)]
            b = refs.b.at[at.slot, pl.ds(column, columns)]
            plgpu.wgmma(accumulator, a, b.T)
            after = find_after(i, after)
            plgpu.wgmma_wait(1)
            pl.when(i > 0)(lambda: ring.release(before))
            return at, after

        at_end, (last, after) = ring.walk(plan.steps, step, at, (at, tile))
        sums = accumulator[...]
        ring.release(last)
        return sums, after, at_end

    sums, after, at = pl.run_scoped(sum_up, plgpu.ACC((rows, columns), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
    return (sums,), after, at


class _Scales(NamedTuple):
    """Of 128 of K."""

    rows: jax.Array | None
    """One for each of a warpgroup's 64 rows, if they are not copied."""
    columns: tuple[jax.Array, ...]
    """One for each ``plan.scaled`` columns of its part."""


def _load_scales(
    plan: _Plan, refs: _Refs, warpgroup: jax.Array, tile: Tile, step: jax.Array | int
) -> _Scales:
    """From global memory."""
    row, _ = plan.offsets(warpgroup)
    first = tile.column + plan.out_column(warpgroup)
    columns = tuple(
        scales[tile.group, lax.div(first + c, SCALE_BLOCK), step]
        for scales in refs.matrix_scales
        for c in range(0, plan.part[1] // plan.matrices, plan.scaled)
    )
    if plan.copied_scales:
        return _Scales(None, columns)
    rows = row_scales(refs.lhs_scale, tile.row + row, step, rows=plan.M, on_gpu=plan.on_gpu)
    return _Scales(rows, columns)


def _row_scales(
    plan: _Plan, refs: _Refs, warpgroup: jax.Array, tile: Tile, scales: _Scales, at: Position
) -> jax.Array:
    if scales.rows is not None:
        return scales.rows
    row, _ = plan.offsets(warpgroup)
    rows = refs.scales[at.slot, pl.ds(row + (tile.row & 3), 64)]
    return plgpu.layout_cast(rows, plgpu.Layout.WGMMA.reduce(1))


def _float8_tile(
    plan: _Plan,
    refs: _Refs,
    ring: Ring,
    warpgroup: jax.Array,
    tile: Tile,
    find_after: Callable[[jax.Array, Tile], Tile],
    scales: _Scales,
    at: Position,
) -> tuple[tuple[jax.Array, ...], Tile, Position]:
    """The part's sums, ``plan.scaled`` columns each, and the tile after this one; ``scales`` are
    the first step's."""
    scaled = plan.scaled
    row, column = plan.offsets(warpgroup)
    _, columns = plan.part

    def step(i: jax.Array, at: Position, carry: Any) -> Any:
        sums, scales, after = carry
        ring.wait_full(at)

        def scaled_product(accumulator: Any) -> Any:
            a = refs.a.at[at.slot, pl.ds(row, 64)]
            b = refs.b.at[at.slot, pl.ds(column, columns)]
            plgpu.wgmma(accumulator, a, b.T)
            # Under the product: nothing but sums is left to do between two products.
            rows = _row_scales(plan, refs, warpgroup, tile, scales, at)
            factors = [rows * s for s in scales.columns]
            ahead = jnp.minimum(i + 1, plan.steps - 1)
            ahead = _load_scales(plan, refs, warpgroup, tile, ahead)
            found = find_after(i, after)
            product = accumulator[...]
            ring.release(at)
            sums_now = tuple(
                s
                + product[:, j * scaled : (j + 1) * scaled]
                * lax.broadcast_in_dim(f, (64, scaled), (0,))
                for j, (s, f) in enumerate(zip(sums, factors, strict=True))
            )
            return sums_now, ahead, found

        accumulator = plgpu.ACC((64, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        return pl.run_scoped(scaled_product, accumulator)

    zero = plgpu.layout_cast(jnp.zeros((64, scaled), jnp.float32), plgpu.Layout.WGMMA)
    carry = (zero,) * (columns // scaled), scales, tile
    at, (sums, _, after) = ring.walk(plan.steps, step, at, carry)
    return sums, after, at


def _store(
    plan: _Plan,
    refs: _Refs,
    warpgroup: jax.Array,
    tile: Tile,
    sums: tuple[jax.Array, ...],
    i: jax.Array,
) -> None:
    """Writes the rows and columns of this warpgroup's part that no other tile writes."""
    slots = plan.config.slots
    (row, _), column = plan.offsets(warpgroup), plan.out_column(warpgroup)
    rows, columns = plan.part[0], plan.part[1] // plan.matrices
    if plan.matrices == 2:
        sums = gated(sums, columns)
    if plan.quantize:
        parts = [_quantize(plan, refs, warpgroup, tile, sums[0], i)]  # all of the part
    else:
        parts = [x.astype(jnp.bfloat16) for x in sums]
    width = parts[0].shape[1]
    pieces = [(r, c) for r in range(0, rows, 64) for c in range(0, columns, plan.staged)]
    for batch in (pieces[i : i + slots] for i in range(0, len(pieces), slots)):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffers = [warpgroup * jnp.int32(slots) + jnp.int32(i) for i in range(len(batch))]
        for buffer, (r, c) in zip(buffers, batch, strict=True):
            start = c % width
            refs.staging[buffer] = parts[c // width][r : r + 64, start : start + plan.staged]
        plgpu.commit_smem()
        for buffer, (r, c) in zip(buffers, batch, strict=True):
            keep = jnp.clip(tile.rows - row - r, 0, 64)
            first_column = tile.column + column + c
            if plan.N % plan.columns:
                keep = jnp.where(first_column >= tile.new, keep, 0)
            window = pl.ds(first_column, plan.staged)
            store_rows(refs.staging_plain.at[buffer], refs.out, keep, tile.row + row + r, window)


def _quantize(
    plan: _Plan, refs: _Refs, warpgroup: jax.Array, tile: Tile, values: jax.Array, i: jax.Array
) -> jax.Array:
    """The part in float8; writes the scales of its rows' one block."""
    (row, _), amax = plan.offsets(warpgroup), jnp.max(jnp.abs(values), axis=1)
    keep = jnp.clip(tile.rows - row, 0, 64)
    if refs.halves is not None:
        amax = refs.halves.maximum(amax, warpgroup, i)
        keep = jnp.where(warpgroup == 0, keep, 0)
    values, scales = quantized(values, amax)
    column = lax.div(tile.column, SCALE_BLOCK)
    store_scales(refs.scale_out, scales, keep, tile.row + row, column, on_gpu=plan.on_gpu)
    return values
