"""The ring buffer of the few-token matmul kernel, and the producer that fills it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.few_tokens_plan import Plan
from pallas_kernels.grouped_matmul.few_tokens_tiles import Tiles, for_matrix, for_width
from pallas_kernels.hopper.branch import when


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """The ring buffer: K steps of tokens and weights in shared memory, and their barriers."""

    plan: Plan
    x: Any
    """[slots, blocks of x, tokens, 64]; on a GPU with two views for each width."""
    weights: Any
    """[slots, features, bytes of a step]."""
    full: Any
    """One barrier per stage. Each copy arrives at it."""
    empty: Any
    """One barrier per stage. Each consumer warpgroup arrives at it."""

    @staticmethod
    def scratch(plan: Plan, dtype: Any) -> list[Any]:
        """Returns the scratch types of the fields after ``plan``. Weights are of ``dtype``."""
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
        copies = plan.copies_per_step * plan.config.k_warpgroups
        full = plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages)
        empty = plgpu.Barrier(num_arrivals=plan.config.warpgroups, num_barriers=plan.stages)
        return [x_scratch, weights, full, empty]

    def tokens(self, n: int, width: int, slot: Any, tiled: bool) -> Any:
        """Returns the tokens of a slot, [blocks of x, width, 64], in the view of width n."""
        if not self.plan.on_gpu:
            return self.x.at[slot, :, pl.ds(0, width)]
        view = self.x[2 * n + (0 if tiled else 1)]
        return view.at[slot * (self.plan.config.max_tokens // width)]


def produce(plan: Plan, tiles: Tiles, ring: Stages, x_g: Any, w_g: Sequence[Any]) -> None:
    """Copies weights and tokens of every K step of this block's tiles to the ring."""
    k_warpgroups, stages, features = plan.config.k_warpgroups, plan.stages, plan.config.features
    step_bytes, x_blocks = plan.step_bytes, plan.x_blocks

    def copy(source: Any, target: Any, stage: Any) -> None:
        plgpu.copy_gmem_to_smem(source, target, ring.full.at[stage])

    def copy_tile(i, fill):
        tile = tiles.locate(i)

        def copy_step(k, fill):
            stage = lax.rem(fill, jnp.int32(stages))

            @when(fill >= stages)
            def _():
                plgpu.barrier_wait(ring.empty.at[stage])

            for part in range(k_warpgroups):
                # Past the end of K the last step is copied again, and counts as zero.
                step = (tile.k_slice * plan.fills + k) * k_warpgroups + part
                step = jnp.minimum(step, plan.weights.k_steps - 1)
                slot = stage * k_warpgroups + part

                def copy_weights(n, step=step, slot=slot):
                    window = pl.ds(tile.feature, features), pl.ds(step * step_bytes, step_bytes)
                    copy(w_g[n].at[tile.group, *window], ring.weights.at[slot], stage)

                def copy_tokens(n, width, step=step, slot=slot):
                    rows = pl.ds(tile.token, width)
                    target = ring.tokens(n, width, slot, tiled=False)
                    if not plan.config.tokens_in_order:
                        copy(x_g.at[pl.ds(step * x_blocks, x_blocks), rows], target, stage)
                        return
                    for b in range(x_blocks):
                        columns = pl.ds((step * x_blocks + b) * 64, 64)
                        copy(x_g.at[rows, columns], target.at[b], stage)

                for_matrix(plan, tile.matrix, copy_weights)
                for_width(plan, tile.tokens, copy_tokens)
            return fill + 1

        return lax.fori_loop(0, plan.fills, copy_step, fill)

    fill = lax.fori_loop(0, tiles.count(), copy_tile, jnp.int32(0))

    def drain(j, carry):
        @when(fill + j >= stages)
        def _():
            plgpu.barrier_wait(ring.empty.at[lax.rem(fill + j, jnp.int32(stages))])

        return carry

    lax.fori_loop(0, stages, drain, 0)
