"""What grouped_matmul's kernel reads and writes: arrays in global memory, and a block's share of
shared memory but for the ring's barriers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.epilogue import Halves
from pallas_kernels.grouped_matmul.plan import MULTIPLIERS, Plan


class Refs(NamedTuple):
    lhs: Any
    matrices: tuple[Any, ...]
    group_sizes: Any
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

    @classmethod
    def of(cls, plan: Plan, refs: Sequence[Any]) -> Refs:
        """Names what the kernel is given: arrays, results and, in its order, :func:`scratch`."""
        remaining = iter(refs)
        lhs = next(remaining)
        matrices = tuple(next(remaining) for _ in range(plan.matrices))
        group_sizes = next(remaining)
        lhs_scale = next(remaining) if plan.float8 else None
        matrix_scales = tuple(next(remaining) for _ in range(plan.matrices if plan.float8 else 0))
        out = next(remaining)
        scale_out = next(remaining) if plan.quantize else None
        a, b = (next(remaining) for _ in range(2))
        scales = next(remaining) if plan.copied_scales else None
        staging = next(remaining)
        halves = Halves(*(next(remaining) for _ in range(2))) if plan.halves else None
        assert not list(remaining)
        both = (lambda ref: ref) if plan.on_gpu else (lambda ref: (ref, ref))
        arrays = lhs, matrices, group_sizes, lhs_scale, matrix_scales, out, scale_out
        return cls(*arrays, *both(a), *both(b), scales, *both(staging), halves)  # pyright: ignore[reportCallIssue]


def scratch(plan: Plan) -> list[Any]:
    """Shared memory of a block, from ``a`` on."""
    config = plan.config

    def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
        width = shape[-1] * jnp.dtype(dtype).itemsize
        swizzle = plgpu.SwizzleTransform(width)
        tiling = plgpu.TilingTransform((8, shape[-1]))
        tiled = plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))
        if not plan.on_gpu:  # the interpreter keeps a RefUnion's members apart
            return tiled
        return plgpu.RefUnion(tiled, plgpu.SMEM(shape, dtype, transforms=(swizzle,)))

    copied_scales = plgpu.SMEM((config.stages, plan.scale_rows), jnp.float32)
    return [
        swizzled((config.stages, config.rows, plan.atom), plan.dtype),
        swizzled((config.stages, config.columns, plan.atom), plan.dtype),
        *([copied_scales] if plan.copied_scales else []),
        swizzled((MULTIPLIERS * config.slots, 64, plan.staged), plan.out_dtype),
        *(Halves.scratch() if plan.halves else []),
    ]
