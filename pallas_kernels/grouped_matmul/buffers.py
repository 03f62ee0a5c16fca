"""Memory of the many-token grouped_matmul kernel: buffers in shared memory, and all references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.plan import CONSUMERS, Plan
from pallas_kernels.hopper.tiles import ROW, ROWS, two_views


class RowMaxExchange:
    """Exchanges row maxima between the two consumer warpgroups, through shared memory.

    It is used if each warpgroup has half of the columns of a tile. There are two sets of maxima, so
    that a warpgroup that is one tile ahead does not overwrite what the other has yet to read. One
    barrier per tile keeps it from being two tiles ahead.
    """

    def __init__(self, maxima: Any, barrier: Any) -> None:
        self._maxima, self._barrier = maxima, barrier

    @staticmethod
    def scratch() -> list[Any]:
        """Returns the scratch types of the constructor's arguments."""
        maxima = plgpu.SMEM((2, CONSUMERS, ROWS), jnp.float32)
        return [maxima, plgpu.Barrier(num_arrivals=CONSUMERS)]

    def maximum(self, own: jax.Array, warpgroup: jax.Array, tile: jax.Array) -> jax.Array:
        """Returns the elementwise maximum of both warpgroups' ``own``, float32 [64].

        Args:
          tile: index of the tile. Both warpgroups call this once per tile.
        """
        maxima = self._maxima.at[tile & 1]
        maxima[warpgroup] = own
        plgpu.barrier_arrive(self._barrier)
        plgpu.barrier_wait(self._barrier)
        other = plgpu.layout_cast(maxima[1 - warpgroup], ROW)
        return jnp.maximum(own, other)


class Buffers(NamedTuple):
    """References to everything that the kernel reads and writes, except the ring's barriers."""

    lhs: Any
    """[M, K] in global memory."""

    matrices: tuple[Any, ...]
    """[G, N, K] in global memory, one or two."""

    group_sizes: Any
    """int32 [G] in global memory."""

    lhs_scale: Any
    """float32 [M, K / 128] in global memory, or its padded transpose for TMA. None for bfloat16."""

    matrix_scales: tuple[Any, ...]
    """float32 [G, N / 128, K / 128] in global memory, one per matrix. Empty for bfloat16."""

    out: Any
    """[M, N] in global memory."""

    out_scale: Any
    """float32 [M, N / 128] in global memory, for a quantized result. Otherwise None."""

    lhs_stages: Any
    """[stages, tile_m, tile_k], tiled."""

    lhs_stages_untiled: Any

    rhs_stages: Any
    """[stages, tile_n, tile_k], tiled."""

    rhs_stages_untiled: Any

    scale_stages: Any
    """float32 [stages, scale_copy_rows] for lhs scales that TMA copies. Otherwise None."""

    matrix_scale_tiles: Any
    """float32 [2, matrices, 2, K / 128]: for this tile and the next one, the scales of the two
    blocks of columns that a tile may touch. None unless the loop is unrolled."""

    staging: Any
    """[CONSUMERS * staging_buffers, 64, staging_width], tiled: results on their way out."""

    staging_untiled: Any

    row_max_exchange: RowMaxExchange | None
    """Exchange of row maxima, for a quantized result whose scale blocks both warpgroups share."""

    @classmethod
    def of(cls, plan: Plan, refs: Sequence[Any]) -> Buffers:
        """Names the kernel's references: operands, results, then those of :func:`scratch`."""
        remaining = iter(refs)
        lhs = next(remaining)
        matrices = tuple(next(remaining) for _ in range(plan.matrices))
        group_sizes = next(remaining)
        lhs_scale = next(remaining) if plan.float8 else None
        matrix_scales = tuple(next(remaining) for _ in range(plan.matrices if plan.float8 else 0))
        out = next(remaining)
        out_scale = next(remaining) if plan.quantize else None
        lhs_stages, rhs_stages = (next(remaining) for _ in range(2))
        scale_stages = next(remaining) if plan.tma_scales else None
        matrix_scale_tiles = next(remaining) if plan.unrolled else None
        staging = next(remaining)
        exchange = None
        if plan.splits_scale_block:
            exchange = RowMaxExchange(*(next(remaining) for _ in range(2)))
        assert not list(remaining)
        views = (lambda ref: ref) if plan.on_gpu else (lambda ref: (ref, ref))
        arrays = lhs, matrices, group_sizes, lhs_scale, matrix_scales, out, out_scale
        stages = *views(lhs_stages), *views(rhs_stages), scale_stages, matrix_scale_tiles
        return cls(*arrays, *stages, *views(staging), exchange)  # pyright: ignore[reportCallIssue]


def scratch(plan: Plan) -> list[Any]:
    """Returns the types of the shared-memory buffers, from ``lhs_stages`` on.

    Groups start at any row, tiled TMA copies at multiples of eight. So copies use the untiled view
    of a buffer, and wgmma and register stores the tiled one.
    """
    config = plan.config

    def views(*shape: int, dtype: Any = plan.dtype) -> Any:
        return two_views(shape, dtype, on_gpu=plan.on_gpu)

    scale_stages = plgpu.SMEM((config.stages, plan.scale_copy_rows), jnp.float32)
    matrix_scales = plgpu.SMEM((2, plan.matrices, 2, plan.k_steps), jnp.float32)
    staging = (CONSUMERS * config.staging_buffers, ROWS, plan.staging_width)
    return [
        views(config.stages, config.tile_m, plan.tile_k),
        views(config.stages, config.tile_n, plan.tile_k),
        *([scale_stages] if plan.tma_scales else []),
        *([matrix_scales] if plan.unrolled else []),
        views(*staging, dtype=plan.out_dtype),
        *(RowMaxExchange.scratch() if plan.splits_scale_block else []),
    ]
