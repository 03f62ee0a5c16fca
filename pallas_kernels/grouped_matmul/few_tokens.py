"""grouped_matmul for decoding on Hopper GPUs: few bfloat16 tokens per group, quantized matrices.

It is chosen for bfloat16 rows with int8, int4 or float8 matrices and at most 64 tokens per group on
average. The time is that of reading the matrices, so they are read once, in the format in which
they are stored. The matmul is transposed, ``out^T = W x^T``: 64 weight rows are the M dimension of
the tensor core instruction, and the few tokens of a group are its N dimension.

One persistent CTA per multiprocessor takes tiles round-robin: 64 to 256 output features by the
tokens of one group. The producer warpgroup keeps a ring buffer filled with K steps of weights and
tokens, by TMA. Each consumer warpgroup unpacks 64 features of a step to bfloat16 in registers,
multiplies them with the tokens in shared memory, applies the scales and adds to float32 sums. With
``k_warpgroups`` > 1 a stage holds one K step for each warpgroup that shares a tile, and their sums
are reduced through shared memory. ``few_tokens_plan`` has the configuration, and
``few_tokens_registers`` the code for single threads.

Budget for 4.3 TB/s on 132 multiprocessors: 16.5 bytes of matrices per cycle at 1.98 GHz, so 64
bytes of 256 rows in 990 cycles. Of int4 these are 64 weights per thread: 24 shifts, 32 ands (both
at half rate), 32 additions, 8 matmul instructions, 6 reads, and 30 more for scales and the ring.
That is 130 issue slots for each of a scheduler's 4 warps, 520 in all, 450 of them in its integer
unit. Shared memory needs 128 cycles to be filled, 128 to be read, and 256 for each 8 tokens, which
every warp reads. Wide tiles use wgmma, which reads the tokens once, but makes its four warps wait
for each other and for its completion. Registers: 32 per thread for unpacked weights, 8 for packed
ones, and twice tokens / 2 for sums. 128 KiB and more are in flight.
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
from jaxtyping import Array, BFloat16, Float, Float32, Int

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.grouped_matmul import few_tokens_registers as registers
from pallas_kernels.grouped_matmul.few_tokens_plan import (
    Config,
    Format,
    Plan,
    Weights,
    default_config,
)
from pallas_kernels.grouped_matmul.reference import Matrices
from pallas_kernels.grouped_matmul.schedule import GroupTiles
from pallas_kernels.hopper import Index, Ref, multiprocessors, require_hopper
from pallas_kernels.hopper.launch import LANE, grid_kernel, overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.tiles import ACC, WGMMA, when_computed
from pallas_kernels.hopper.warpgroup import cond, when
from pallas_kernels.hopper.wgmma import keep_live

_FORMATS: dict[Any, Format] = {
    jnp.dtype(jnp.int8): "int8",
    jnp.dtype(jnp.uint8): "int4",
    jnp.dtype(FLOAT8): "float8",
}
# Registers per thread of the (producer, consumers), by number of consumer warpgroups.
_REGISTERS = {1: (40, 216), 2: (40, 232), 4: (32, 112)}


# ---- launch --------------------------------------------------------------------------------------


def grouped_matmuls(
    lhs: Float[Array, "M K"],
    matrices: Sequence[Matrices],
    group_sizes: Int[Array, " G"],
    scales: Sequence[Float32[Array, "G Nb Kb"]],
    *,
    block_shape: tuple[int, int] = (128, 128),
    config: Config | None = None,
    interpret: Any = None,
) -> BFloat16[Array, "M N_of_all"]:
    """Multiplies every token with each of its group's matrices, and joins the results along the
    last axis. It is one kernel, because starting and finishing one takes several microseconds. Any
    group sizes are correct; 1 to 64 tokens per group are fast.

    Raises NotImplementedError unless lhs is bfloat16, the matrices are int8, int4 or float8_e4m3fn
    of one shape, and N, K and the scale blocks are multiples of what :class:`Weights` requires."""
    require_hopper(interpret)
    first = matrices[0]
    if lhs.dtype != jnp.bfloat16 or not scales or first.dtype not in _FORMATS:
        raise NotImplementedError(
            f"takes bfloat16 rows and int8, int4 or float8 matrices, got {lhs.dtype}, {first.dtype}"
        )
    (M, K), G = lhs.shape, len(first)
    weights = weights_of(first, K, block_shape)
    if config is None:
        config = default_config(M, G, weights, len(matrices))
    # A tile's tokens are copied whole. TMA fills with zeros past the end; the interpreter does not.
    rows = max(M, config.max_tokens) if interpret is None else M + config.max_tokens
    if config.tokens_in_order:
        tokens = jnp.pad(lhs, ((0, rows - M), (0, 0)))
    else:
        tokens = permute_columns(lhs, weights, rows)
    arrays = tokens, tuple(matrices), tuple(scales), group_sizes
    ctas = multiprocessors() if interpret is None else 2
    options: Any = {"weights": weights, "config": config, "interpret": interpret}
    partial_results = _matmul(*arrays, M=M, ctas=ctas, **options)
    if len(partial_results) == 1:
        return partial_results[0]
    return jnp.sum(partial_results, axis=0).astype(lhs.dtype)


def weights_of(matrices: Matrices, K: int, block_shape: tuple[int, int]) -> Weights:
    """Returns the layout of matrices with K columns. It raises as :meth:`Weights.of`."""
    return Weights.of(_FORMATS[jnp.dtype(matrices.dtype)], matrices.shape[1], K, block_shape)


def permute_columns(
    lhs: BFloat16[Array, "M K"], weights: Weights, rows: int
) -> BFloat16[Array, "blocks rows 64"]:
    """Permutes the columns of lhs to the order in which the kernel unpacks the weights' columns, in
    blocks of 64, with zeros from row M up to ``rows``.

    A thread reads 16 bytes of a weight row and unpacks them in its registers. What it has then is
    an operand of a tensor core instruction only if the columns are permuted. Permuting the few
    tokens is far cheaper than permuting the weights."""
    M, K = lhs.shape
    if weights.bits == 8:
        # (thread, word, pair, half): a word's bytes are unpacked as 0, 2 and then 1, 3.
        x = lhs.reshape(M, K // 64, 4, 4, 2, 2).transpose(1, 0, 3, 5, 2, 4)
    else:
        # (thread, block, word, pair, slice, half): a word's half bytes as 0, 4; 1, 5; 2, 6; 3, 7.
        x = lhs.reshape(M, K // 128, 4, 2, 2, 2, 2, 2).transpose(1, 3, 0, 4, 6, 7, 2, 5)
    return jnp.pad(x.reshape(K // 64, M, 64), ((0, 0), (0, rows - M), (0, 0)))


@lowered_once("M", "weights", "config", "ctas", "interpret")
def _matmul(
    x: BFloat16[Array, "blocks rows 64"] | BFloat16[Array, "rows K"],
    matrices: Sequence[Matrices],
    scales: Sequence[Float32[Array, "G Nb Kb"]],
    group_sizes: Int[Array, " G"],
    *,
    M: int,
    weights: Weights,
    config: Config,
    ctas: int,
    interpret: Any,
) -> Float[Array, "split_k M N_of_all"]:
    """Multiplies each token with its group's matrices, all of one shape. ``x`` are the tokens of
    :func:`permute_columns`, or with ``tokens_in_order`` as they are. With split-K, the results are
    float32 partial sums."""
    plan = Plan(weights, config, M, len(matrices), scales[0].shape[2], ctas, interpret is None)
    gpu, consumers, matrix_count = plan.on_gpu, config.warpgroups, plan.matrices
    ring_scratch = _Stages.scratch(plan, matrices[0].dtype)

    def few_tokens(x_g: Ref, *refs: Any) -> None:
        w_g, scale_g = refs[:matrix_count], refs[matrix_count : 2 * matrix_count]
        sizes_g, out_g, *scratch = refs[2 * matrix_count :]
        ring = _Stages(plan, *scratch[: len(ring_scratch)])
        reduction = scratch[len(ring_scratch) :]
        overlap_preceding_kernel(interpret=interpret)
        warpgroup, cta = lax.axis_index("wg"), lax.axis_index("cta")
        tiles = _Tiles(plan, GroupTiles(sizes_g, config.max_tokens, on_gpu=gpu), cta)

        @when(warpgroup == consumers)
        def _() -> None:
            plgpu.set_max_registers(_REGISTERS[consumers][0], action="decrease")
            _produce(plan, tiles, ring, x_g, w_g)

        @when(warpgroup < consumers)
        def _() -> None:
            plgpu.set_max_registers(_REGISTERS[consumers][1], action="increase")
            k_part = lax.rem(warpgroup, jnp.int32(config.k_warpgroups))
            first_row = lax.div(warpgroup, jnp.int32(config.k_warpgroups)) * 64
            first_row = pl.multiple_of(first_row, 64)
            split = _Reduction(config.k_warpgroups, *reduction) if reduction else None
            _Consumer(plan, tiles, ring, scale_g, out_g, split, warpgroup, k_part, first_row).run()

    dtype = jnp.bfloat16 if config.split_k == 1 else jnp.float32
    return grid_kernel(
        few_tokens,
        jax.ShapeDtypeStruct((config.split_k, M, matrix_count * weights.N), dtype),
        [*ring_scratch, *_Reduction.scratch(plan)],
        warpgroups=consumers + 1,
        grid={"cta": ctas},
        interpret=interpret,
        lowering_semantics=LANE,
    )(x, *matrices, *scales, group_sizes.astype(jnp.int32))


# ---- tiles ---------------------------------------------------------------------------------------


class _Tile(NamedTuple):
    """A number of output features by the tokens of a group. All fields are int32."""

    group: Index
    token: Index  # first token
    tokens: Index  # number of tokens
    matrix: Any  # index of the matrix in its group
    k_slice: Index  # index of the slice of K, with split-K
    feature: Index
    first_new_feature: Index  # first feature that the tile before it does not have


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The tiles of one CTA, which takes them round-robin."""

    plan: Plan
    groups: GroupTiles
    cta: Index

    def count(self) -> jax.Array:
        """Returns the number of the CTA's tiles. Each role computes it for itself, so that it takes
        no register meanwhile."""
        plan = self.plan
        total = self.groups.count() * (plan.matrices * plan.feature_tiles * plan.config.split_k)
        return lax.div(total - self.cta + (plan.ctas - 1), jnp.int32(plan.ctas))

    def locate(self, i: Index) -> _Tile:
        plan, N, features = self.plan, self.plan.weights.N, self.plan.config.features
        t, indices = self.cta + i * plan.ctas, []
        for choices in (plan.config.split_k, plan.feature_tiles, plan.matrices):
            indices.append(jnp.int32(0) if choices == 1 else lax.rem(t, jnp.int32(choices)))
            t = t if choices == 1 else lax.div(t, jnp.int32(choices))
        k_slice, feature_tile, matrix = indices
        first = feature_tile * features
        feature = jnp.minimum(first, N - features) if N % features else first
        return _Tile(*self.groups.locate(t), matrix, k_slice, feature, first)


def _for_matrix(plan: Plan, matrix: Any, body: Callable[[int], None]) -> None:
    """Runs ``body(n)`` for the static index n that equals ``matrix``."""
    for n in range(plan.matrices):
        if plan.matrices == 1:
            body(n)
        else:
            when(matrix == n)(functools.partial(body, n))


def _for_width(plan: Plan, tokens: Index, body: Callable[[int, int], None]) -> None:
    """Runs ``body(n, width)`` for the narrowest of the token widths that holds a tile."""
    widths, max_tokens, low = plan.config.token_widths, plan.config.max_tokens, 0
    for n, width in enumerate(widths):
        if len(widths) == 1:
            body(n, width)
        else:
            high = width if width != max_tokens else max_tokens + 1
            when((tokens > low) & (tokens <= high))(functools.partial(body, n, width))
        low = width


# ---- the producer, and the ring buffer that it fills ---------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Stages:
    """The ring buffer: K steps of tokens and weights in shared memory, and their barriers."""

    plan: Plan
    x: Ref  # [slots, blocks of x, tokens, 64]; on a GPU with two views for each width
    weights: Ref  # [slots, features, bytes of a step]
    full: Any  # one barrier per stage; each copy arrives at it
    empty: Any  # one barrier per stage; each consumer warpgroup arrives at it

    @staticmethod
    def scratch(plan: Plan, dtype: Any) -> list[Any]:
        """Returns the scratch types of the fields after ``plan``. Weights are of ``dtype``."""
        swizzle = (plgpu.SwizzleTransform(128),)
        tiling = (plgpu.TilingTransform((8, 64)), *swizzle)
        max_tokens = plan.config.max_tokens
        if plan.on_gpu:
            # Two views of the same memory for each width: tiled for wgmma, untiled for TMA.
            views = []
            for width in plan.config.token_widths:
                shape = plan.slots * (max_tokens // width), plan.x_blocks, width, 64
                views += [plgpu.SMEM(shape, jnp.bfloat16, transforms=t) for t in (tiling, swizzle)]
            x_scratch = plgpu.RefUnion(*views)
        else:
            x_scratch = plgpu.SMEM((plan.slots, plan.x_blocks, max_tokens, 64), jnp.bfloat16)
        shape = plan.slots, plan.config.features, plan.weights.step_bytes
        transforms = swizzle if plan.weights.column_blocks == 2 and plan.on_gpu else ()
        weights = plgpu.SMEM(shape, dtype, transforms=transforms)
        copies_per_step = 1 + (plan.x_blocks if plan.config.tokens_in_order else 1)
        copies = copies_per_step * plan.config.k_warpgroups
        full = plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages)
        empty = plgpu.Barrier(num_arrivals=plan.config.warpgroups, num_barriers=plan.stages)
        return [x_scratch, weights, full, empty]

    def tokens(self, n: int, width: int, slot: Index, tiled: bool) -> Any:
        """Returns the tokens of a slot, [blocks of x, width, 64], in the view of width n."""
        if not self.plan.on_gpu:
            return self.x.at[slot, :, pl.ds(0, width)]
        view = self.x[2 * n + (0 if tiled else 1)]
        return view.at[slot * (self.plan.config.max_tokens // width)]


def _produce(plan: Plan, tiles: _Tiles, ring: _Stages, x_g: Ref, w_g: Sequence[Any]) -> None:
    """Copies weights and tokens of every K step of this CTA's tiles to the ring."""
    k_warpgroups, stages, features = plan.config.k_warpgroups, plan.stages, plan.config.features
    step_bytes, x_blocks = plan.weights.step_bytes, plan.x_blocks

    def copy(source: Ref, target: Ref, stage: Index) -> None:
        plgpu.copy_gmem_to_smem(source, target, ring.full.at[stage])

    def copy_tile(i: Index, fill: Index) -> Any:
        tile = tiles.locate(i)

        def copy_step(k: Index, fill: Index) -> Any:
            stage = lax.rem(fill, jnp.int32(stages))
            when(fill >= stages)(lambda: plgpu.barrier_wait(ring.empty.at[stage]))

            def copy_weights(step: Index, slot: Index, n: int) -> None:
                window = pl.ds(tile.feature, features), pl.ds(step * step_bytes, step_bytes)
                copy(w_g[n].at[tile.group, *window], ring.weights.at[slot], stage)

            def copy_tokens(step: Index, slot: Index, n: int, width: int) -> None:
                rows, target = pl.ds(tile.token, width), ring.tokens(n, width, slot, tiled=False)
                if not plan.config.tokens_in_order:
                    copy(x_g.at[pl.ds(step * x_blocks, x_blocks), rows], target, stage)
                    return
                for b in range(x_blocks):
                    columns = pl.ds((step * x_blocks + b) * 64, 64)
                    copy(x_g.at[rows, columns], target.at[b], stage)

            for part in range(k_warpgroups):
                # Past the end of K the last step is copied again, and counts as zero.
                step = (tile.k_slice * plan.fills + k) * k_warpgroups + part
                step = jnp.minimum(step, plan.weights.k_steps - 1)
                slot = stage * k_warpgroups + part
                _for_matrix(plan, tile.matrix, functools.partial(copy_weights, step, slot))
                _for_width(plan, tile.tokens, functools.partial(copy_tokens, step, slot))
            return fill + 1

        return lax.fori_loop(0, plan.fills, copy_step, fill)

    fill = lax.fori_loop(0, tiles.count(), copy_tile, jnp.int32(0))

    def drain(j: Index, carry: Any) -> Any:
        @when(fill + j >= stages)
        def _() -> None:
            plgpu.barrier_wait(ring.empty.at[lax.rem(fill + j, jnp.int32(stages))])

        return carry

    lax.fori_loop(0, stages, drain, 0)


# ---- the consumers -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Consumer:
    """A consumer warpgroup, which computes 64 features of every tile, or a part of their K."""

    plan: Plan
    tiles: _Tiles
    ring: _Stages
    scales: Sequence[Any]  # float32 [G, Nb, Kb] in global memory, one per matrix
    out: Ref
    reduction: _Reduction | None
    warpgroup: Index
    k_part: Index  # index among the warpgroups that share a tile
    first_row: Index  # first of its features in the tile

    def run(self) -> None:
        def consume_tile(i: Index, carry: Any) -> Any:
            tile = self.tiles.locate(i)
            body = functools.partial(self.compute_tile, i, tile)
            _for_width(self.plan, tile.tokens, body)
            return carry

        lax.fori_loop(0, self.tiles.count(), consume_tile, 0)
        if self.reduction is not None:
            self.reduction.drain(self.k_part, self.tiles.count)

    def compute_tile(self, i: Index, tile: _Tile, n: int, width: int) -> None:
        """Computes a tile of at most ``width`` tokens, the n-th of the token widths."""
        plan, weights, ring = self.plan, self.plan.weights, self.ring
        k_warpgroups, fills = plan.config.k_warpgroups, plan.fills
        feature, tokens = tile.feature + self.first_row, tile.tokens
        if weights.N % plan.config.features:
            tokens = jnp.where(feature < tile.first_new_feature, 0, tokens)
        first_fill = i * fills
        first_step = tile.k_slice * (fills * k_warpgroups) + self.k_part

        def k_step(k: Index, carry: Any) -> Any:
            total, step_scales = carry
            stage = lax.rem(first_fill + k, jnp.int32(plan.stages))
            step = first_step + k * k_warpgroups
            next_scales = step_scales
            if not weights.is_scaled_last:
                later = step + k_warpgroups
                next_scales = self.load_scales(tile.group, tile.matrix, feature, later)
            plgpu.barrier_wait(ring.full.at[stage])
            slot = stage * k_warpgroups + self.k_part
            firsts = range(0, weights.column_blocks, weights.blocks_per_scale)
            for j, first in enumerate(firsts):
                product = self.multiply(n, width, slot, first)
                if fills * k_warpgroups * plan.config.split_k > weights.k_steps:
                    product = product * jnp.where(step < weights.k_steps, 1.0, 0.0)
                if not weights.is_scaled_last:
                    product = _scaled(product, step_scales[j])
                total = total + product
            if not plan.on_gpu:
                # The interpreter requires a fence between reading a stage and the copy that
                # overwrites it. A GPU requires that everything loaded from it has been used.
                plgpu.commit_smem()
            else:
                stage = when_computed(stage, _unknown_zero(i), total)
            plgpu.barrier_arrive(ring.empty.at[stage])
            return total, next_scales

        total = jnp.zeros((64, width), jnp.float32)
        if plan.on_gpu:
            total = plgpu.layout_cast(total, WGMMA)
        first_scales = self.load_scales(tile.group, tile.matrix, feature, first_step)
        total, last_scales = lax.fori_loop(0, fills, k_step, (total, first_scales))
        if weights.is_scaled_last:
            total = _scaled(total, last_scales[0])

        def finish(total: jax.Array) -> None:
            at = tile.k_slice, tile.token, tile.matrix * weights.N + feature
            result, blocks = total.astype(self.out.dtype), weights.column_blocks
            registers.store_transposed(self.out, at, result, tokens, blocks, on_gpu=plan.on_gpu)

        if self.reduction is None:
            finish(total)
        else:
            self.reduction.reduce(total, i, self.warpgroup, self.k_part, finish, on_gpu=plan.on_gpu)

    def load_scales(
        self, group: Index, matrix: Any, feature: Index, step: Index
    ) -> tuple[Any, ...]:
        """Returns the scales of a K step, one per ``blocks_per_scale`` column blocks: vectors over
        the 64 features, or scalars."""
        plan, weights = self.plan, self.plan.weights

        def load(n: int) -> tuple[Any, ...]:
            loaded, scales = [], self.scales[n]
            for first in range(0, weights.column_blocks, weights.blocks_per_scale):
                column = step * weights.step_columns + first * weights.block_columns
                kb = lax.div(column, jnp.int32(weights.scale_columns))
                kb = jnp.minimum(kb, plan.scales - 1)
                if weights.scale_rows > 1:
                    row = lax.div(feature, jnp.int32(weights.scale_rows))
                    loaded.append(scales[group, row, kb])
                elif not plan.on_gpu:
                    loaded.append(scales[group, pl.ds(feature, 64), kb])
                else:
                    rows = scales.at[group, pl.ds(feature, 64), kb]
                    loaded.append(registers.load_row_scales(rows, weights.column_blocks))
            return tuple(loaded)

        def choose(n: int) -> tuple[Any, ...]:
            if n == plan.matrices - 1:
                return load(n)
            return cond(matrix == n, functools.partial(load, n), functools.partial(choose, n + 1))

        return choose(0)

    def multiply(self, n: int, width: int, slot: Index, first: int) -> jax.Array:
        """Returns the product of column blocks ``first`` to ``first + blocks_per_scale`` of 64
        features with the tokens: float32 [64, width], not scaled."""
        weights, ring, config = self.plan.weights, self.ring, self.plan.config
        rows, form, in_order = pl.ds(self.first_row, 64), weights.format, config.tokens_in_order
        blocks = range(first, first + weights.blocks_per_scale)
        x_first = weights.block_columns // 64 * first
        if not self.plan.on_gpu:
            values = ring.weights[slot, rows]
            packed = [values[:, 64 * b : 64 * b + 64] for b in blocks]
            unpacked = [registers.unpack_in_interpreter(b, form, in_order=in_order) for b in packed]
            x_end = weights.block_columns // 64 * (first + weights.blocks_per_scale)
            tokens = ring.x[slot][x_first:x_end, :width].astype(jnp.float32)
            weights = jnp.concatenate(unpacked, axis=1)
            return jnp.einsum("nbk,bmk->nm", weights, tokens, precision="highest")

        packed, column_blocks = ring.weights.at[slot, rows], weights.column_blocks
        if not config.uses_wgmma(width):
            tokens = ring.tokens(n, width, slot, tiled=False)
            return registers.multiply(
                packed, tokens, form, blocks, column_blocks, width, in_order=in_order
            )

        def multiply_with_wgmma(accumulator: Ref) -> jax.Array:
            unpacked = [registers.unpack(packed, form, b, column_blocks) for b in blocks]
            operands = [a for block in unpacked for a in block]
            tokens = ring.tokens(n, width, slot, tiled=True)
            for b, a in enumerate(operands):
                plgpu.wgmma(accumulator, a, tokens.at[x_first + b].T)
            product = accumulator[...]
            # ptxas before 13.3 may reuse the registers before wgmma is complete.
            keep_live(*operands)
            return product

        return pl.run_scoped(multiply_with_wgmma, ACC((64, width), jnp.float32))


def _scaled(product: jax.Array, scale: jax.Array) -> jax.Array:
    if scale.ndim:
        scale = lax.broadcast_in_dim(scale, product.shape, (0,))
    return product * scale


def _unknown_zero(i: Index) -> jax.Array:
    """Returns 0, which no compiler knows. A CTA's tile ``i`` is one of fewer than 2^24."""
    return lax.shift_right_logical(i, jnp.int32(24))


# ---- sums of several warpgroups ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Reduction:
    """The sum over the warpgroups that share a tile's features, through shared memory. The first of
    them adds the others' sums to its own."""

    k_warpgroups: int  # that share a tile
    partial_sums: Ref  # float32 [partial warpgroups, 64 * tokens] in shared memory
    written: Any  # completes when all partial sums of a tile are in shared memory
    read: Any  # completes when all of them have been read

    @staticmethod
    def scratch(plan: Plan) -> Sequence[Any]:
        """Returns the scratch types of a reduction, none if warpgroups share no tiles."""
        config = plan.config
        if config.k_warpgroups == 1:
            return ()
        return (
            plgpu.SMEM((config.partial_warpgroups, 64 * config.max_tokens), jnp.float32),
            plgpu.Barrier(num_arrivals=config.partial_warpgroups),
            plgpu.Barrier(num_arrivals=config.warpgroups - config.partial_warpgroups),
        )

    def reduce(
        self, total: jax.Array, i: Index, warpgroup: Index, k_part: Index,
        finish: Callable[[jax.Array], None], *, on_gpu: bool,
    ) -> None:  # fmt: skip
        """Calls ``finish`` with the whole sum in the first of the warpgroups that share the CTA's
        i-th tile. ``total`` is this warpgroup's sum [64, width]."""
        first = lax.div(warpgroup, jnp.int32(self.k_warpgroups)) * (self.k_warpgroups - 1)

        @when(k_part > 0)
        def _() -> None:
            when(i > 0)(lambda: plgpu.barrier_wait(self.read))
            target = self.partial_sums.at[first + k_part - 1]
            registers.store_partial_sum(target, total, on_gpu=on_gpu)
            plgpu.barrier_arrive(self.written)

        @when(k_part == 0)
        def _() -> None:
            plgpu.barrier_wait(self.written)
            whole = total
            for part in range(self.k_warpgroups - 1):
                source = self.partial_sums.at[first + part]
                whole = whole + registers.load_partial_sum(source, total.shape[1], on_gpu=on_gpu)
            zero = jnp.int32(0)
            if on_gpu:  # the sums that were loaded must have been used before the arrival
                zero = when_computed(zero, _unknown_zero(i), whole)
            when(zero == 0)(lambda: plgpu.barrier_arrive(self.read))
            finish(whole)

    def drain(self, k_part: Index, tile_count: Callable[[], Any]) -> None:
        """Waits until the last partial sums have been read. A CTA may exit only then."""
        when((k_part > 0) & (tile_count() > 0))(lambda: plgpu.barrier_wait(self.read))
