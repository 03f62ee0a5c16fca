"""The Hopper kernel for few tokens per group: producer, consumers, scales and split-K reduction.

One persistent thread block per multiprocessor takes tiles round-robin: 64 to 256 output features by
the tokens of one group. The producer warpgroup keeps a ring buffer filled with K steps of weights
and tokens, by TMA. Each consumer warpgroup unpacks 64 features of a step to bfloat16 in registers,
multiplies them with the tokens in shared memory, applies the scales and adds to float32 sums. With
``k_warpgroups`` > 1 a stage holds one K step for each warpgroup that shares a tile, and their sums
are reduced through shared memory. ``few_tokens_plan`` has the configuration, and
``few_tokens_registers`` the code for single threads.

Budget for 4.3 TB/s on 132 multiprocessors: 16.5 bytes of matrices per cycle at 1.98 GHz, so 64
bytes of 256 rows in 990 cycles. Of int4 these are 64 weights per thread: 24 shifts, 32 ands (both
at half rate), 32 additions, 8 matmul instructions, 6 reads, and 30 more for scales and the ring.
That is 130 issue slots for each of a scheduler's 4 warps, 520 in all, 450 of them in its integer
unit. Shared memory needs 128 cycles to be filled, 128 to be read, and 256 for each 8 tokens, which
every warp reads, up to 16 tokens. Wider tiles use wgmma, which reads the tokens once, but makes its
four warps wait for each other and for its completion. Registers: 32 per thread for unpacked
weights, 8 for packed ones, and twice tokens / 2 for sums. 128 KiB and more are in flight.
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

from pallas_kernels.grouped_matmul import few_tokens_registers as registers
from pallas_kernels.grouped_matmul.few_tokens_plan import Config, Weights, stages_that_fit
from pallas_kernels.grouped_matmul.reference import Matrices
from pallas_kernels.grouped_matmul.tile_scheduler import GroupTiles

# Registers per thread of the (producer, consumers), by number of consumer warpgroups.
_REGISTERS = {1: (40, 216), 2: (40, 232), 3: (56, 152), 4: (32, 112)}


@functools.partial(
    jax.jit, static_argnames=("M", "weights", "config", "thread_blocks", "interpret")
)
def matmul(
    x: BFloat16[Array, "blocks rows 64"],
    matrices: Sequence[Matrices],
    scales: Sequence[Float32[Array, "G Nb Kb"]],
    group_sizes: Int[Array, " G"],
    *,
    M: int,
    weights: Weights,
    config: Config,
    thread_blocks: int,
    interpret: Any,
) -> Float[Array, "split_k M N_of_all"]:
    """Multiplies each token with its group's matrices, all of one shape.

    The results of several matrices are concatenated along the last axis.

    Args:
      x: tokens, as :func:`few_tokens.permute_columns` returns them.
      thread_blocks: number of thread blocks in the grid.

    Returns:
      bfloat16 [1, M, N_of_all], or with split-K float32 partial sums.
    """
    N, column_blocks, block_columns = weights.N, weights.column_blocks, weights.block_columns
    consumers, widths, max_tokens = config.warpgroups, config.token_widths, config.max_tokens
    stages, k_warpgroups = config.stages or stages_that_fit(weights, config), config.k_warpgroups
    features, step_columns, step_bytes = (
        config.features,
        column_blocks * block_columns,
        64 * column_blocks,
    )
    k_steps, feature_tiles = weights.k_steps, -(-N // features)
    matrix_count, scale_count, split_k = len(matrices), scales[0].shape[2], config.split_k
    fills = -(-k_steps // (k_warpgroups * split_k))  # of stages, per tile
    k_divides_evenly = fills * k_warpgroups * split_k == k_steps
    x_blocks = step_columns // 64  # blocks of 64 columns of x per K step
    i32 = jnp.int32
    gpu = interpret is None
    if features > N:
        raise NotImplementedError(f"takes N of at least {features}, got {N}")

    def few_tokens(x_g, *refs):
        w_g, scale_g, refs = (
            refs[:matrix_count],
            refs[matrix_count : 2 * matrix_count],
            refs[2 * matrix_count :],
        )
        sizes_g, out_g, x_s, w_s, full, empty, *reduction = refs
        warpgroup, block = lax.axis_index("wg"), lax.axis_index("sm")
        group_tiles = GroupTiles(sizes_g, max_tokens, on_gpu=gpu)

        # ---- tiles ----

        def tile_count():
            """Returns the number of this block's tiles. Each role computes it for itself, so that
            it takes no register meanwhile."""
            total = group_tiles.count() * (matrix_count * feature_tiles * split_k)
            return lax.div(total - block + (thread_blocks - 1), i32(thread_blocks))

        def locate(i):
            """Returns this block's i-th tile: group, first token, number of tokens, matrix, K
            slice, first feature, first feature that no other tile writes."""
            t, indices = block + i * thread_blocks, []
            for choices in (split_k, feature_tiles, matrix_count):
                indices.append(i32(0) if choices == 1 else lax.rem(t, i32(choices)))
                t = t if choices == 1 else lax.div(t, i32(choices))
            k_slice, feature_tile, matrix = indices
            own_feature = feature_tile * features
            # The last tile is moved back to end at N, so that it overlaps the one before it.
            feature = jnp.minimum(own_feature, N - features) if N % features else own_feature
            return *group_tiles.locate(t), matrix, k_slice, feature, own_feature

        # ---- static choices ----

        def for_matrix(matrix, body):
            """Runs ``body(n)`` for the static index n that equals ``matrix``."""
            for n in range(matrix_count):
                if matrix_count == 1:
                    body(n)
                else:
                    pl.when(matrix == n)(functools.partial(body, n))

        def for_width(tokens, body):
            """Runs ``body(n, width)`` for the narrowest of the token widths that holds a tile."""
            low = 0
            for n, width in enumerate(widths):
                if len(widths) == 1:
                    body(n, width)
                else:
                    high = width if width != max_tokens else max_tokens + 1
                    pl.when((tokens > low) & (tokens <= high))(
                        lambda n=n, width=width: body(n, width)
                    )
                low = width

        def x_stage(n, width, stage, tiled):
            """Returns the tokens of a stage, [x_blocks, width, 64], in the view of width n."""
            if not gpu:
                return x_s.at[stage, :, pl.ds(0, width)]
            return x_s[2 * n + (0 if tiled else 1)].at[stage * (max_tokens // width)]

        # ---- the producer ----

        @pl.when(warpgroup == consumers)
        def _produce():
            plgpu.set_max_registers(_REGISTERS[consumers][0], action="decrease")

            def copy_tile(i, fill):
                group, token, tokens, matrix, k_slice, feature, _ = locate(i)

                def copy_step(k, fill):
                    stage = lax.rem(fill, i32(stages))

                    @pl.when(fill >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[stage])

                    for part in range(k_warpgroups):
                        # Past the end of K the last step is copied again, and counts as zero.
                        step = (k_slice * fills + k) * k_warpgroups + part
                        step = jnp.minimum(step, k_steps - 1)
                        slot = stage * k_warpgroups + part
                        for_matrix(
                            matrix,
                            lambda n, step=step, slot=slot: plgpu.copy_gmem_to_smem(
                                w_g[n].at[
                                    group,
                                    pl.ds(feature, features),
                                    pl.ds(step * step_bytes, step_bytes),
                                ],
                                w_s.at[slot],
                                full.at[stage],
                            ),
                        )
                        for_width(
                            tokens,
                            lambda n, width, step=step, slot=slot: plgpu.copy_gmem_to_smem(
                                x_g.at[pl.ds(step * x_blocks, x_blocks), pl.ds(token, width)],
                                x_stage(n, width, slot, tiled=False),
                                full.at[stage],
                            ),
                        )
                    return fill + 1

                return lax.fori_loop(0, fills, copy_step, fill)

            fill = lax.fori_loop(0, tile_count(), copy_tile, i32(0))

            def drain(j, carry):
                @pl.when(fill + j >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[lax.rem(fill + j, i32(stages))])

                return carry

            lax.fori_loop(0, stages, drain, 0)

        # ---- the consumers ----

        @pl.when(warpgroup < consumers)
        def _consume():
            plgpu.set_max_registers(_REGISTERS[consumers][1], action="increase")
            k_part = lax.rem(warpgroup, i32(k_warpgroups))
            first_row = pl.multiple_of(lax.div(warpgroup, i32(k_warpgroups)) * 64, 64)

            def load_scales(group, matrix, feature, step):
                """Returns the scales of a K step, one per ``blocks_per_scale`` column blocks.

                Each is a vector over the 64 features, or a scalar.
                """

                def load(n):
                    loaded = []
                    for first in range(0, column_blocks, weights.blocks_per_scale):
                        column = step * step_columns + first * block_columns
                        kb = lax.div(column, i32(weights.scale_columns))
                        kb = jnp.minimum(kb, scale_count - 1)
                        if weights.scale_rows > 1:
                            row = lax.div(feature, i32(weights.scale_rows))
                            loaded.append(scale_g[n][group, row, kb])
                        elif not gpu:
                            loaded.append(scale_g[n][group, pl.ds(feature, 64), kb])
                        else:
                            rows = scale_g[n].at[group, pl.ds(feature, 64), kb]
                            loaded.append(registers.load_row_scales(rows, column_blocks))
                    return tuple(loaded)

                def choose(n):
                    if n == matrix_count - 1:
                        return load(n)
                    return lax.cond(
                        matrix == n, functools.partial(load, n), functools.partial(choose, n + 1)
                    )

                return choose(0)

            def multiply(n, width, slot, first):
                """Returns the product of column blocks ``first`` to ``first + blocks_per_scale`` of
                64 features with the tokens: float32 [64, width], not scaled."""
                rows = pl.ds(first_row, 64)
                blocks = range(first, first + weights.blocks_per_scale)
                x_first = block_columns // 64 * first
                if not gpu:
                    values = w_s[slot, rows]
                    unpacked = [
                        registers.unpack_in_interpreter(
                            values[:, 64 * b : 64 * b + 64], weights.format
                        )
                        for b in blocks
                    ]
                    x_end = block_columns // 64 * (first + weights.blocks_per_scale)
                    return jnp.einsum(
                        "nbk,bmk->nm",
                        jnp.concatenate(unpacked, axis=1),
                        x_s[slot][x_first:x_end, :width].astype(jnp.float32),
                        precision="highest",
                    )

                packed = w_s.at[slot, rows]
                if width <= config.max_mma_tokens:
                    tokens = x_stage(n, width, slot, tiled=False)
                    return registers.multiply(
                        packed, tokens, weights.format, blocks, column_blocks, width
                    )

                def multiply_with_wgmma(accumulator):
                    unpacked = [
                        registers.unpack(packed, weights.format, b, column_blocks) for b in blocks
                    ]
                    operands = [a for block in unpacked for a in block]
                    tokens = x_stage(n, width, slot, tiled=True)
                    for b, a in enumerate(operands):
                        plgpu.wgmma(accumulator, a, tokens.at[x_first + b].T)
                    product = accumulator[...]
                    if config.keep_operands:
                        registers.keep(*operands)
                    return product

                accumulator = plgpu.ACC((64, width), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
                return pl.run_scoped(multiply_with_wgmma, accumulator)

            def scaled(value, scale, width):
                if scale.ndim:
                    scale = lax.broadcast_in_dim(scale, (64, width), (0,))
                return value * scale

            def compute_tile(i, tile, n, width):
                group, token, tokens, matrix, k_slice, feature, own_feature = tile
                feature = feature + first_row
                if N % features:
                    tokens = jnp.where(feature < own_feature, 0, tokens)
                first_fill = i * fills
                first_step = k_slice * (fills * k_warpgroups) + k_part

                def k_step(k, carry):
                    total, step_scales = carry
                    stage = lax.rem(first_fill + k, i32(stages))
                    step = first_step + k * k_warpgroups
                    next_scales = (
                        step_scales
                        if weights.is_scaled_last
                        else load_scales(group, matrix, feature, step + k_warpgroups)
                    )
                    plgpu.barrier_wait(full.at[stage])
                    slot = stage * k_warpgroups + k_part
                    for j, first in enumerate(range(0, column_blocks, weights.blocks_per_scale)):
                        product = multiply(n, width, slot, first)
                        if not k_divides_evenly:
                            product = product * jnp.where(step < k_steps, 1.0, 0.0)
                        if not weights.is_scaled_last:
                            product = scaled(product, step_scales[j], width)
                        total = total + product
                    if not gpu:
                        # The interpreter requires a fence between reading a stage and the copy that
                        # overwrites it. On a GPU the weights are in registers by now.
                        plgpu.commit_smem()
                    plgpu.barrier_arrive(empty.at[stage])
                    return total, next_scales

                total = jnp.zeros((64, width), jnp.float32)
                if gpu:
                    total = plgpu.layout_cast(total, plgpu.Layout.WGMMA)
                first_scales = load_scales(group, matrix, feature, first_step)
                total, last_scales = lax.fori_loop(0, fills, k_step, (total, first_scales))
                if weights.is_scaled_last:
                    total = scaled(total, last_scales[0], width)
                if k_warpgroups == 1:
                    store(total, width, k_slice, token, tokens, matrix * N + feature)
                    return

                # The first of the warpgroups that share the features adds the others' sums to its
                # own. ``written`` completes when all partial sums are in shared memory, ``read``
                # when all have been read.
                partial_sums, written, read = reduction
                first_partial = lax.div(warpgroup, i32(k_warpgroups)) * (k_warpgroups - 1)

                @pl.when(k_part > 0)
                def _write_partial_sum():
                    @pl.when(i > 0)
                    def _():
                        plgpu.barrier_wait(read)

                    target = partial_sums.at[first_partial + k_part - 1]
                    registers.store_partial_sum(target, total, on_gpu=gpu)
                    plgpu.barrier_arrive(written)

                @pl.when(k_part == 0)
                def _reduce():
                    plgpu.barrier_wait(written)
                    whole = total
                    for part in range(k_warpgroups - 1):
                        source = partial_sums.at[first_partial + part]
                        whole = whole + registers.load_partial_sum(source, width, on_gpu=gpu)
                    plgpu.barrier_arrive(read)
                    store(whole, width, k_slice, token, tokens, matrix * N + feature)

            def store(total, width, k_slice, token, tokens, column):
                """Stores the transpose of ``total`` [64, width], its first ``tokens`` columns."""
                result = total.astype(out_g.dtype)
                if gpu:
                    target = out_g.at[k_slice, pl.ds(token, width), pl.ds(column, 64)]
                    registers.store_transposed(target, result, tokens, column_blocks)
                    return
                for j in range(width):

                    @pl.when(j < tokens)
                    def _(j=j):
                        out_g[k_slice, token + j, pl.ds(column, 64)] = result[:, j]

            def consume_tile(i, carry):
                tile = locate(i)
                for_width(tile[2], lambda n, width: compute_tile(i, tile, n, width))
                return carry

            lax.fori_loop(0, tile_count(), consume_tile, 0)
            if k_warpgroups > 1:

                @pl.when((k_part > 0) & (tile_count() > 0))
                def _():
                    plgpu.barrier_wait(reduction[2])

    reduction = () if k_warpgroups == 1 else (
        plgpu.SMEM((config.partial_warpgroups, 64 * max_tokens), jnp.float32),
        plgpu.Barrier(num_arrivals=config.partial_warpgroups),
        plgpu.Barrier(num_arrivals=consumers - config.partial_warpgroups),
    )  # fmt: skip
    swizzle = (plgpu.SwizzleTransform(128),)
    tiling = (plgpu.TilingTransform((8, 64)), *swizzle)
    slots = stages * k_warpgroups
    if gpu:
        # Two views of the same memory for each width: tiled for wgmma, untiled for TMA.
        x_scratch = plgpu.RefUnion(
            *(
                plgpu.SMEM(
                    (slots * (max_tokens // width), x_blocks, width, 64),
                    jnp.bfloat16,
                    transforms=transforms,
                )
                for width in widths
                for transforms in (tiling, swizzle)
            )
        )
    else:
        x_scratch = plgpu.SMEM((slots, x_blocks, max_tokens, 64), jnp.bfloat16)
    return plgpu.kernel(
        few_tokens,
        out_type=jax.ShapeDtypeStruct(
            (split_k, M, matrix_count * N), jnp.bfloat16 if split_k == 1 else jnp.float32
        ),
        scratch_types=[
            x_scratch,
            plgpu.SMEM(
                (slots, features, step_bytes),
                matrices[0].dtype,
                transforms=swizzle if column_blocks == 2 and gpu else (),
            ),
            plgpu.Barrier(num_arrivals=2 * k_warpgroups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            *reduction,
        ],
        grid=(thread_blocks,),
        grid_names=("sm",),
        num_threads=consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(x, *matrices, *scales, group_sizes.astype(jnp.int32))
