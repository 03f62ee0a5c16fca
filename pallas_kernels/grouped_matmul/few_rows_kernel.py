"""The kernel of few_rows: copies, loops, products and scales. How it is set is in few_rows_plan,
what threads do to their registers in few_rows_registers.

Plan, for 4.3 TB/s on 132 multiprocessors: 16.5 bytes of matrices a cycle at 1.98 GHz, 64 bytes of
256 rows in 990 cycles. Of int4 these are 64 weights a thread: 24 shifts, 32 ands (both at half
rate), 32 additions, 8 products, 6 reads, 30 more for scales and the ring: 130 issue slots of each
of a scheduler's 4 warps, 520 in all, 450 of them in its integer unit. Shared memory: 128 cycles of
copying in, 128 of reading, and 256 for each 8 rows of x, which every warp reads, up to 16 rows;
more rows take the product of a warpgroup, which reads x once, but makes its four warps wait for one
another and for it. Registers: 32 a thread of unpacked weights, 8 as read, rows / 2 of sums twice.
128 KiB and more are under way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int

from pallas_kernels.grouped_matmul import few_rows_registers as registers
from pallas_kernels.grouped_matmul.few_rows_plan import Config, Weights, stages_that_fit
from pallas_kernels.grouped_matmul.reference import Matrices
from pallas_kernels.grouped_matmul.row_tiles import RowTiles

# (copying, multiplying) of each warpgroup, by multiplying warpgroups.
_REGISTERS = {1: (40, 216), 2: (40, 232), 3: (56, 152), 4: (32, 112)}


@functools.partial(
    jax.jit, static_argnames=("M", "weights", "config", "blocks_of_grid", "interpret")
)
def product(
    x: BFloat16[Array, "blocks rows 64"],
    matrices: Sequence[Matrices],
    scales: Sequence[Float32[Array, "G Nb Kb"]],
    group_sizes: Int[Array, " G"],
    *,
    M: int,
    weights: Weights,
    config: Config,
    blocks_of_grid: int,
    interpret: Any,
) -> Float[Array, "pieces M N_of_all"]:
    """Rows times each of the matrices of their group, all of one shape: results side by side, in
    bfloat16, or of several pieces of K in float32."""
    N, parts, part = weights.N, weights.parts, weights.part
    W, classes, most = config.warpgroups, config.classes, config.most_rows
    S, split = config.stages or stages_that_fit(weights, config), config.split
    tile, step, width = config.tile, parts * part, 64 * parts
    steps, column_tiles = weights.steps, -(-N // tile)
    count, scale_columns, pieces = len(matrices), scales[0].shape[2], config.pieces
    # A stage holds a step for each warpgroup that shares a tile.
    turns = -(-steps // (split * pieces))
    every_step_counts = turns * split * pieces == steps
    blocks = step // 64  # of x, a step
    i32 = jnp.int32
    gpu = interpret is None
    if tile > N:
        raise NotImplementedError(f"takes N of at least {tile}, got {N}")

    def few_rows(x_g, *refs):
        w_g, scale_g, refs = refs[:count], refs[count : 2 * count], refs[2 * count :]
        sizes_g, out_g, x_u, w_s, full, empty, *of_split = refs
        wg, block = lax.axis_index("wg"), lax.axis_index("sm")
        row_tiles = RowTiles(sizes_g, most, on_gpu=gpu)

        def own_tiles():
            """Of this block's tiles; by each role for itself, which costs no register meanwhile."""
            total = row_tiles.total() * (count * column_tiles * pieces)
            return lax.div(total - block + (blocks_of_grid - 1), i32(blocks_of_grid))

        def locate(i):
            """Of this block's i-th tile: group, first row, rows, which matrix, which piece, first
            column, first own column."""
            t, found = block + i * blocks_of_grid, []
            for choices in (pieces, column_tiles, count):
                found.append(i32(0) if choices == 1 else lax.rem(t, i32(choices)))
                t = t if choices == 1 else lax.div(t, i32(choices))
            piece, place, which = found
            own = place * tile
            # The last tile is moved back to end where N ends: not all its columns are its own.
            column = jnp.minimum(own, N - tile) if N % tile else own
            return *row_tiles.locate(t), which, piece, column, own

        def for_matrix(which, then):
            for n in range(count):
                if count == 1:
                    then(n)
                else:
                    pl.when(which == n)(functools.partial(then, n))

        def for_class(rows, then):
            low = 0
            for n, c in enumerate(classes):
                if len(classes) == 1:
                    then(n, c)
                else:
                    high = c if c != most else most + 1
                    pl.when((rows > low) & (rows <= high))(lambda n=n, c=c: then(n, c))
                low = c

        def x_slot(n, c, slot, tiled):
            """[blocks, c, 64] of a stage."""
            if not gpu:
                return x_u.at[slot, :, pl.ds(0, c)]
            return x_u[2 * n + (0 if tiled else 1)].at[slot * (most // c)]

        @pl.when(wg == W)
        def _copy():
            plgpu.set_max_registers(_REGISTERS[W][0], action="decrease")

            def copy_tile(i, it):
                group, row, rows, which, piece, column, _ = locate(i)

                def copy_step(k, it):
                    slot = lax.rem(it, i32(S))

                    @pl.when(it >= S)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    for part_of_k in range(split):
                        # Where K ends early the last step comes again, and is not counted.
                        at = (piece * turns + k) * split + part_of_k
                        at = jnp.minimum(at, steps - 1)
                        there = slot * split + part_of_k
                        for_matrix(
                            which,
                            lambda n, at=at, there=there: plgpu.copy_gmem_to_smem(
                                w_g[n].at[group, pl.ds(column, tile), pl.ds(at * width, width)],
                                w_s.at[there],
                                full.at[slot],
                            ),
                        )
                        for_class(
                            rows,
                            lambda n, c, at=at, there=there: plgpu.copy_gmem_to_smem(
                                x_g.at[pl.ds(at * blocks, blocks), pl.ds(row, c)],
                                x_slot(n, c, there, tiled=False),
                                full.at[slot],
                            ),
                        )
                    return it + 1

                return lax.fori_loop(0, turns, copy_step, it)

            it = lax.fori_loop(0, own_tiles(), copy_tile, i32(0))

            def drain(j, carry):
                @pl.when(it + j >= S)
                def _():
                    plgpu.barrier_wait(empty.at[lax.rem(it + j, i32(S))])

                return carry

            lax.fori_loop(0, S, drain, 0)

        @pl.when(wg < W)
        def _multiply():
            plgpu.set_max_registers(_REGISTERS[W][1], action="increase")
            own_part = lax.rem(wg, i32(split))
            first = pl.multiple_of(lax.div(wg, i32(split)) * 64, 64)

            def scales_of(group, which, column, k):
                """Of a step's units: a row's each, or a scalar."""

                def of(n):
                    found = []
                    for u in range(0, parts, weights.unit):
                        kb = lax.div(k * step + u * part, i32(weights.group))
                        kb = jnp.minimum(kb, scale_columns - 1)
                        if weights.scale_rows > 1:
                            rows = lax.div(column, i32(weights.scale_rows))
                            found.append(scale_g[n][group, rows, kb])
                        elif not gpu:
                            found.append(scale_g[n][group, pl.ds(column, 64), kb])
                        else:
                            rows = scale_g[n].at[group, pl.ds(column, 64), kb]
                            found.append(registers.row_scales(rows, parts))
                    return tuple(found)

                def choose(n):
                    if n == count - 1:
                        return of(n)
                    return lax.cond(
                        which == n, functools.partial(of, n), functools.partial(choose, n + 1)
                    )

                return choose(0)

            def unit_of(n, c, slot, u):
                """[64, c], the product of parts u to u + unit."""
                rows = pl.ds(first, 64)
                of_unit = range(u, u + weights.unit)
                if not gpu:
                    values = w_s[slot, rows]
                    pairs = [
                        registers.plain(values[:, 64 * p : 64 * p + 64], weights.format)
                        for p in of_unit
                    ]
                    mine = x_u[slot][part // 64 * u : part // 64 * (u + weights.unit), :c]
                    return jnp.einsum(
                        "nbk,bmk->nm",
                        jnp.concatenate(pairs, axis=1),
                        mine.astype(jnp.float32),
                        precision="highest",
                    )

                words = w_s.at[slot, rows]
                if c <= config.alone:
                    at = x_slot(n, c, slot, tiled=False)
                    return registers.multiply(words, at, weights.format, of_unit, parts, c)

                def scoped(acc):
                    unpacked = [registers.unpack(words, weights.format, p, parts) for p in of_unit]
                    flat = [a for p in unpacked for a in p]
                    at = x_slot(n, c, slot, tiled=True)
                    for b, a in enumerate(flat):
                        plgpu.wgmma(acc, a, at.at[part // 64 * u + b].T)
                    done = acc[...]
                    if config.hold:
                        registers.hold(*flat)
                    return done

                acc = plgpu.ACC((64, c), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
                return pl.run_scoped(scoped, acc)

            def scaled(value, by, c):
                if by.ndim:
                    by = lax.broadcast_in_dim(by, (64, c), (0,))
                return value * by

            def tile_of(i, here, n, c):
                group, row, rows, which, piece, column, own = here
                column = column + first
                if N % tile:
                    rows = jnp.where(column < own, 0, rows)
                start, first_step = i * turns, piece * (turns * split) + own_part

                def multiply_step(k, carry):
                    total, scales = carry
                    slot, mine = lax.rem(start + k, i32(S)), first_step + k * split
                    ahead = (
                        scales
                        if weights.scale_last
                        else scales_of(group, which, column, mine + split)
                    )
                    plgpu.barrier_wait(full.at[slot])
                    for j, u in enumerate(range(0, parts, weights.unit)):
                        done = unit_of(n, c, slot * split + own_part, u)
                        if not every_step_counts:
                            done = done * jnp.where(mine < steps, 1.0, 0.0)
                        total = total + (done if weights.scale_last else scaled(done, scales[j], c))
                    if not gpu:
                        # The interpreter wants a fence between reading and the next copy over it;
                        # on a GPU the values have come when the products are done.
                        plgpu.commit_smem()
                    plgpu.barrier_arrive(empty.at[slot])
                    return total, ahead

                total = jnp.zeros((64, c), jnp.float32)
                if gpu:
                    total = plgpu.layout_cast(total, plgpu.Layout.WGMMA)
                scales = scales_of(group, which, column, first_step)
                total, scales = lax.fori_loop(0, turns, multiply_step, (total, scales))
                if weights.scale_last:
                    total = scaled(total, scales[0], c)
                if split == 1:
                    write(total, c, piece, row, rows, which * N + column)
                    return
                sums, summed, taken = of_split
                leader = lax.div(wg, i32(split)) * (split - 1)

                @pl.when(own_part > 0)
                def _hand_over():
                    @pl.when(i > 0)
                    def _():
                        plgpu.barrier_wait(taken)

                    registers.put(sums.at[leader + own_part - 1], total, on_gpu=gpu)
                    plgpu.barrier_arrive(summed)

                @pl.when(own_part == 0)
                def _take_over():
                    plgpu.barrier_wait(summed)
                    whole = total
                    for helper in range(split - 1):
                        whole = whole + registers.take(sums.at[leader + helper], c, on_gpu=gpu)
                    plgpu.barrier_arrive(taken)
                    write(whole, c, piece, row, rows, which * N + column)

            def write(total, c, piece, row, rows, column):
                done = total.astype(out_g.dtype)
                if gpu:
                    at = out_g.at[piece, pl.ds(row, c), pl.ds(column, 64)]
                    registers.store(at, done, rows, parts)
                    return
                for j in range(c):

                    @pl.when(j < rows)
                    def _(j=j):
                        out_g[piece, row + j, pl.ds(column, 64)] = done[:, j]

            def multiply_tile(i, carry):
                here = locate(i)
                for_class(here[2], lambda n, c: tile_of(i, here, n, c))
                return carry

            lax.fori_loop(0, own_tiles(), multiply_tile, 0)
            if split > 1:

                @pl.when((own_part > 0) & (own_tiles() > 0))
                def _():
                    plgpu.barrier_wait(of_split[2])

    of_split = () if split == 1 else (
        plgpu.SMEM((config.helpers, 64 * most), jnp.float32),
        plgpu.Barrier(num_arrivals=config.helpers),
        plgpu.Barrier(num_arrivals=W - config.helpers),
    )  # fmt: skip
    swizzle = (plgpu.SwizzleTransform(128),)
    swizzled = swizzle if parts == 2 and gpu else ()
    tiling = (plgpu.TilingTransform((8, 64)), *swizzle)
    if gpu:
        x_scratch = plgpu.RefUnion(
            *(
                plgpu.SMEM(
                    (S * split * (most // c), blocks, c, 64), jnp.bfloat16, transforms=transforms
                )
                for c in classes
                for transforms in (tiling, swizzle)
            )
        )
    else:
        x_scratch = plgpu.SMEM((S * split, blocks, most, 64), jnp.bfloat16)
    return plgpu.kernel(
        few_rows,
        out_type=jax.ShapeDtypeStruct(
            (pieces, M, count * N), jnp.bfloat16 if pieces == 1 else jnp.float32
        ),
        scratch_types=[
            x_scratch,
            plgpu.SMEM(
                (S * split, tile, width),
                matrices[0].dtype,
                transforms=swizzled,
            ),
            plgpu.Barrier(num_arrivals=2 * split, num_barriers=S),
            plgpu.Barrier(num_arrivals=W, num_barriers=S),
            *of_split,
        ],
        grid=(blocks_of_grid,),
        grid_names=("sm",),
        num_threads=W + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(x, *matrices, *scales, group_sizes.astype(jnp.int32))
