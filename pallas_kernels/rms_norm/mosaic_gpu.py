"""rms_norm and add_rms_norm of a single row on Hopper GPUs.

XLA compiles the norm of one row to two kernels, because it reduces before it scales. For several
rows it compiles one kernel, which is as fast as ours would be.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float

from pallas_kernels.dispatch import with_gradients_of
from pallas_kernels.hopper import require_hopper
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.rms_norm import reference

_THREADS = 128
# Shorter rows are slices of a longer one, and XLA fuses their norms with the slicing.
_MIN_COLUMNS = 2048


def rms_norm(
    x: Float[Array, "*batch D"], weight: Float[Array, " D"], *, eps: float, interpret: Any = None
) -> Float[Array, "*batch D"]:
    """Implements :func:`pallas_kernels.rms_norm`. Its gradient is the reference's. Raises
    NotImplementedError for no Hopper GPU, more rows than one, a dtype other than bfloat16, fewer
    than 2,048 columns, or a number of columns that is not a multiple of 256."""
    return _normed((x,), weight, eps, interpret)[0]


def add_rms_norm(
    x: Float[Array, "*batch D"],
    y: Float[Array, "*batch D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
    interpret: Any = None,
) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch D"]]:
    """Implements :func:`pallas_kernels.add_rms_norm`, as :func:`rms_norm`."""
    total, normed = _normed((x, y), weight, eps, interpret)
    return total, normed


def _normed(
    addends: tuple[jax.Array, ...], weight: jax.Array, eps: float, interpret: Any
) -> list[jax.Array]:
    require_hopper(interpret)
    *batch, D = addends[0].shape
    rows, dtypes = math.prod(batch), {str(x.dtype) for x in (*addends, weight)}
    if rows != 1:
        raise NotImplementedError(
            f"takes one row, got {rows}: XLA normalises several in one kernel"
        )
    if dtypes != {"bfloat16"}:
        raise NotImplementedError(f"takes bfloat16, got {', '.join(sorted(dtypes))}")
    if D < _MIN_COLUMNS or D % (2 * _THREADS):
        raise NotImplementedError(
            f"takes a multiple of 256 columns, {_MIN_COLUMNS} or more, got {D}"
        )

    def exact(*arrays: jax.Array) -> Any:
        if len(arrays) == 2:
            return (reference.rms_norm(*arrays, eps=eps),)
        return reference.add_rms_norm(*arrays, eps=eps)

    def kernel(*arrays: jax.Array) -> Any:
        return norm_row(arrays[:-1], arrays[-1], eps=eps, interpret=interpret)

    results = with_gradients_of(exact, kernel)(*(x.reshape(D) for x in addends), weight)
    return [x.reshape(*batch, D) for x in results]


@lowered_once("eps", "interpret")
def norm_row(
    addends: tuple[BFloat16[Array, " D"], ...],
    weight: BFloat16[Array, " D"],
    *,
    eps: float,
    interpret: Any = None,
) -> tuple[BFloat16[Array, " D"], ...]:
    """Returns (norm of the addend) for one addend, or (sum, norm of the sum) for two."""
    (D,), count = weight.shape, len(addends)

    def rms_norm(*refs: Any) -> None:
        *added_g, weight_g = refs[: count + 1]
        *sum_g, out_g = refs[count + 1 :]

        rows = [ref[...].astype(jnp.float32) for ref in (*added_g, weight_g)]
        row, factors = functools.reduce(jnp.add, rows[:-1]), rows[-1]
        for ref in sum_g:
            ref[...] = row.astype(weight.dtype)
            row = row.astype(weight.dtype).astype(jnp.float32)
        mean = jnp.sum(row * row) * (1 / D)
        out_g[...] = (row * lax.rsqrt(mean + eps) * factors).astype(weight.dtype)

    return plgpu.kernel(
        rms_norm,
        out_type=(jax.ShapeDtypeStruct((D,), weight.dtype),) * count,
        grid=(1,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(*addends, weight)
