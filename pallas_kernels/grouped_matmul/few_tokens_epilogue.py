"""The end of a tile of the few-token matmul kernel: split sums are added, and results stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul import few_tokens_registers as registers
from pallas_kernels.grouped_matmul.few_tokens_plan import Plan
from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.loads import when_computed


@dataclasses.dataclass(frozen=True, eq=False)
class Reduction:
    """The sum over the warpgroups that share a tile's features, through shared memory.

    The first of them adds the others' sums to its own.
    """

    k_warpgroups: int
    """Number of warpgroups that share a tile."""

    partial_sums: Any
    """Float32 [partial warpgroups, 64 * tokens] in shared memory."""

    written: Any
    """Completes when all partial sums of a tile are in shared memory."""

    read: Any
    """Completes when all of them have been read."""

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
        self,
        total: jax.Array,
        i: Any,
        warpgroup: Any,
        k_part: Any,
        finish: Callable[[jax.Array], None],
        *,
        on_gpu: bool,
    ) -> None:
        """Calls ``finish`` with the whole sum in the first of the warpgroups that share a tile.

        Args:
          total: this warpgroup's sum, [64, width].
          i: index of the tile in its thread block.
          k_part: index of the warpgroup among those that share the tile.
        """
        first = lax.div(warpgroup, jnp.int32(self.k_warpgroups)) * (self.k_warpgroups - 1)

        @when(k_part > 0)
        def _write_partial_sum():
            @when(i > 0)
            def _():
                plgpu.barrier_wait(self.read)

            target = self.partial_sums.at[first + k_part - 1]
            registers.store_partial_sum(target, total, on_gpu=on_gpu)
            plgpu.barrier_arrive(self.written)

        @when(k_part == 0)
        def _reduce():
            plgpu.barrier_wait(self.written)
            whole = total
            for part in range(self.k_warpgroups - 1):
                source = self.partial_sums.at[first + part]
                whole = whole + registers.load_partial_sum(source, total.shape[1], on_gpu=on_gpu)
            zero = jnp.int32(0)
            if on_gpu:  # the sums that were loaded must have been used before the arrival
                zero = when_computed(zero, unknown_zero(i), whole)
            when(zero == 0)(lambda: plgpu.barrier_arrive(self.read))
            finish(whole)

    def drain(self, k_part: Any, tile_count: Callable[[], Any]) -> None:
        """Waits until the last partial sums have been read. A program may exit only then."""

        @when((k_part > 0) & (tile_count() > 0))
        def _():
            plgpu.barrier_wait(self.read)


def unknown_zero(i: Any) -> Any:
    """Returns 0, which no compiler knows. A block's tile ``i`` is one of fewer than 2^24."""
    return lax.shift_right_logical(i, jnp.int32(24))


def store(
    plan: Plan, out: Any, total: jax.Array, k_slice: Any, token: Any, tokens: Any, column: Any
) -> None:
    """Stores the transpose of ``total`` [64, width], its first ``tokens`` columns."""
    width = total.shape[1]
    result = total.astype(out.dtype)
    if plan.on_gpu:
        target = out.at[k_slice, pl.ds(token, width), pl.ds(column, 64)]
        registers.store_transposed(target, result, tokens, plan.weights.column_blocks)
        return
    for j in range(width):

        @when(j < tokens)
        def _(j=j):
            out[k_slice, token + j, pl.ds(column, 64)] = result[:, j]
