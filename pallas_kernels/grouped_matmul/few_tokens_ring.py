"""The ring buffer of the few-token matmul kernel, and the producer that fills it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.few_tokens_plan import SCALES_PER_COPY, Plan
from pallas_kernels.grouped_matmul.few_tokens_tiles import Tile, Tiles, for_matrix, for_width
from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.copies import TmaCopy
from pallas_kernels.hopper.warpgroup import WARPS

_ALL_THREADS_ARRIVE = "Pallas"  # in place of interpreter parameters: Pallas' own barriers


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """The ring buffer: K steps of tokens and weights in shared memory, and their barriers."""

    plan: Plan
    x: Any
    """[slots, blocks of x, tokens, 64]; on a GPU with two views for each width."""
    weights: Any
    """[slots, features, bytes of a step]."""
    full: Barriers
    """One barrier per stage. Each copy is one arrival, or with leaders each call of ``fill``."""
    empty: Barriers
    """One barrier per stage. Each consumer warpgroup arrives at it."""
    scales: Any = None
    """float32 [scale_stages, features, SCALES_PER_COPY], with ``tma_scales``."""
    scales_full: Barriers | None = None
    """One barrier per copy in ``scales``."""

    @staticmethod
    def scratch(plan: Plan, dtype: Any) -> list[Any]:
        """Returns the scratch types of :meth:`of`'s references. Weights are of ``dtype``."""
        config, consumers = plan.config, plan.consumers
        scale_stages = plan.scale_stages if config.tma_scales else 0
        shape = scale_stages, config.features, SCALES_PER_COPY
        scales = [plgpu.SMEM(shape, jnp.float32)] if scale_stages else []
        if plan.leads:
            count = 2 * plan.stages + scale_stages
            return [*_operands(plan, dtype), *scales, Barriers.scratch(count, 0, None)]
        copies = plan.copies_per_step * config.k_warpgroups
        counts = (plan.stages, copies), (plan.stages, consumers), (scale_stages, 1)
        barriers = [
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
            for count, arrivals in counts
            if count
        ]
        return [*_operands(plan, dtype), *scales, *barriers]

    @classmethod
    def of(cls, plan: Plan, refs: Sequence[Any]) -> Stages:
        """Returns the ring whose memory :meth:`scratch` allocated."""
        x, weights, *refs = refs
        scales = refs.pop(0) if plan.config.tma_scales else None
        if plan.leads:
            (memory,) = refs
            barriers = [Barriers(memory, None, first=n * plan.stages) for n in range(3)]
        else:
            barriers = [Barriers(memory, _ALL_THREADS_ARRIVE) for memory in refs]
        full, empty, *rest = barriers
        return cls(plan, x, weights, full, empty, scales, rest[0] if scales is not None else None)

    def initialise(self) -> None:
        """Initialises barriers of leaders. Every thread calls it before any other use."""
        if not self.plan.leads:
            return
        config, stages = self.plan.config, self.plan.stages
        arrivals = [2 * config.k_warpgroups] * stages + [self.plan.consumers * WARPS] * stages
        scales = [1] * self.plan.scale_stages if config.tma_scales else []
        self.full.initialise([*arrivals, *scales], cluster=False)

    def use(self, fill: Any) -> Any:
        """Returns the index of a fill's use of its stage, or 0 if Pallas' barriers count uses."""
        return lax.div(fill, jnp.int32(self.plan.stages)) if self.plan.leads else 0

    def tokens(self, n: int, width: int, slot: Any, tiled: bool) -> Any:
        """Returns the tokens of a slot, [blocks of x, width, 64], in the view of width n."""
        if not self.plan.on_gpu:
            return self.x.at[slot, :, pl.ds(0, width)]
        view = self.x[2 * n + (0 if tiled else 1)]
        return view.at[slot * (self.plan.config.max_tokens // width)]

    def scale_slot(self, tile: Any, fill: Any) -> tuple[Any, Any]:
        """Returns the buffer in ``scales`` of a fill's copy, and the index of the buffer's use.

        Args:
          tile: index of the tile in its thread block.
          fill: index of the fill in its tile.
        """
        plan = self.plan
        copy = lax.div(fill, jnp.int32(plan.fills_per_scale_copy)) + tile * plan.scale_copies
        stages = jnp.int32(plan.scale_stages)
        return lax.rem(copy, stages), lax.div(copy, stages)


def _operands(plan: Plan, dtype: Any) -> list[Any]:
    """Returns the scratch types of tokens and weights."""
    swizzle = (plgpu.SwizzleTransform(128),)
    tiling = (plgpu.TilingTransform((8, 64)), *swizzle)
    max_tokens = plan.config.max_tokens
    if plan.on_gpu:
        # Two views of the same memory for each width: tiled for wgmma, untiled for TMA.
        x_scratch = plgpu.RefUnion(
            *(
                plgpu.SMEM(
                    (plan.slots * (max_tokens // width), plan.x_blocks, width, 64),
                    jnp.bfloat16,
                    transforms=transforms,
                )
                for width in plan.config.token_widths
                for transforms in (tiling, swizzle)
            )
        )
    else:
        x_scratch = plgpu.SMEM((plan.slots, plan.x_blocks, max_tokens, 64), jnp.bfloat16)
    weights = plgpu.SMEM(
        (plan.slots, plan.config.features, plan.step_bytes),
        dtype,
        transforms=swizzle if plan.weights.column_blocks == 2 and plan.on_gpu else (),
    )
    return [x_scratch, weights]


def produce(
    plan: Plan, tiles: Tiles, ring: Stages, x_g: Any, w_g: Sequence[Any], scales_g: Sequence[Any]
) -> None:
    """Copies weights, tokens and scales of every K step of this block's tiles to the ring.

    One warp calls it if leaders arrive at the barriers, otherwise a warpgroup.
    """
    config, stages, features = plan.config, plan.stages, plan.config.features
    step_bytes, x_blocks = plan.step_bytes, plan.x_blocks

    def start(barriers: Barriers, i: Any, source: Any, swizzle: int | None, *parts: Any) -> None:
        copies = [TmaCopy(source, *part, tiled=False, swizzle=swizzle) for part in parts]
        barriers.fill(i, copies, scope=mgpu.ThreadSubset.WARPGROUP)

    def copy_scales(i: Any, tile: Tile, k: Any) -> None:
        full, (slot, _) = ring.scales_full, ring.scale_slot(i, k)
        assert full is not None
        first = plan.first_scale(tile.k_slice, lax.div(k, jnp.int32(plan.fills_per_scale_copy)))
        window = tile.group, pl.ds(tile.feature, features), pl.ds(first, SCALES_PER_COPY)
        target = ring.scales.at[slot]
        for_matrix(
            plan,
            tile.matrix,
            lambda n: start(full, slot, scales_g[n], None, (window, target)),
        )

    def copy_tile(i, fill):
        tile = tiles.locate(i)

        def copy_step(k, fill):
            stage = lax.rem(fill, jnp.int32(stages))

            @when(fill >= stages)
            def _():
                ring.empty.wait(stage, ring.use(fill) - 1)

            if config.tma_scales:
                is_first = lax.rem(k, jnp.int32(plan.fills_per_scale_copy)) == 0
                when(is_first)(lambda: copy_scales(i, tile, k))
            for part in range(config.k_warpgroups):
                # Past the end of K the last step is copied again, and counts as zero.
                step = (tile.k_slice * plan.fills + k) * config.k_warpgroups + part
                step = jnp.minimum(step, plan.weights.k_steps - 1)
                slot = stage * config.k_warpgroups + part

                def copy_weights(n, step=step, slot=slot):
                    columns = pl.ds(step * step_bytes, step_bytes)
                    window = tile.group, pl.ds(tile.feature, features), columns
                    swizzle = 128 if plan.weights.column_blocks == 2 else None
                    start(ring.full, stage, w_g[n], swizzle, (window, ring.weights.at[slot]))

                def copy_tokens(n, width, step=step, slot=slot):
                    target, rows = (
                        ring.tokens(n, width, slot, tiled=False),
                        pl.ds(tile.token, width),
                    )
                    blocks = pl.ds(step * x_blocks, x_blocks), rows, pl.ds(0, 64)
                    parts: list[Any] = [(blocks, target)]
                    if config.tokens_in_order:
                        parts = [
                            ((rows, pl.ds((step * x_blocks + b) * 64, 64)), target.at[b])
                            for b in range(x_blocks)
                        ]
                    start(ring.full, stage, x_g, 128, *parts)

                for_matrix(plan, tile.matrix, copy_weights)
                for_width(plan, tile.tokens, copy_tokens)
            return fill + 1

        return lax.fori_loop(0, plan.fills, copy_step, fill)

    fill = lax.fori_loop(0, tiles.count(), copy_tile, jnp.int32(0))

    def drain(j, carry):
        @when(fill + j >= stages)
        def _():
            ring.empty.wait(lax.rem(fill + j, jnp.int32(stages)), ring.use(fill + j) - 1)

        return carry

    lax.fori_loop(0, stages, drain, 0)
