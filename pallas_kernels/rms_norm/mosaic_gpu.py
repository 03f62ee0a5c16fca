"""rms_norm and add_rms_norm on Hopper GPUs: of one row, of which XLA makes two kernels, for it sums
before it does the rest.

Of several rows it makes one, as good as any.
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

from pallas_kernels.hopper import require_hopper
from pallas_kernels.rms_norm import reference

_THREADS = 128
_LEAST = 2048  # columns: shorter rows are parts of others, which XLA norms where it joins them


def rms_norm(
    x: Float[Array, "*batch D"], weight: Float[Array, " D"], *, eps: float, interpret: Any = None
) -> Float[Array, "*batch D"]:
    """As :func:`pallas_kernels.rms_norm`; its gradient is the reference's.

    Raises:
      NotImplementedError: no Hopper GPU, not one row, a dtype that is not bfloat16, or fewer than
        2,048 columns or no multiple of 256.
    """
    return _normed((x,), weight, eps, interpret)[0]


def add_rms_norm(
    x: Float[Array, "*batch D"],
    y: Float[Array, "*batch D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
    interpret: Any = None,
) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch D"]]:
    """As :func:`pallas_kernels.add_rms_norm`; its gradient is the reference's.

    Raises:
      NotImplementedError: as :func:`rms_norm`.
    """
    total, normed = _normed((x, y), weight, eps, interpret)
    return total, normed


def _normed(
    addends: tuple[jax.Array, ...], weight: jax.Array, eps: float, interpret: Any
) -> list[jax.Array]:
    require_hopper(interpret)
    *batch, D = addends[0].shape
    rows, dtypes = math.prod(batch), {str(x.dtype) for x in (*addends, weight)}
    if rows != 1:
        raise NotImplementedError(f"takes one row, got {rows}: XLA norms several in one kernel")
    if dtypes != {"bfloat16"}:
        raise NotImplementedError(f"takes bfloat16, got {', '.join(sorted(dtypes))}")
    if D < _LEAST or D % (2 * _THREADS):
        raise NotImplementedError(f"takes columns in 256, {_LEAST} and more, got {D}")
    found: Any = _norm(eps, interpret, tuple(x.reshape(D) for x in addends), weight)
    return [x.reshape(*batch, D) for x in found]


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def norm_row(
    addends: tuple[BFloat16[Array, " D"], ...],
    weight: BFloat16[Array, " D"],
    *,
    eps: float,
    interpret: Any = None,
) -> tuple[BFloat16[Array, " D"], ...]:
    """The norm of an array, or the sum of two and its norm."""
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(
    eps: float, interpret: Any, addends: tuple[jax.Array, ...], weight: jax.Array
) -> tuple[jax.Array, ...]:
    return norm_row(addends, weight, eps=eps, interpret=interpret)


def _forward(eps: float, interpret: Any, addends: Any, weight: jax.Array) -> Any:
    return _norm(eps, interpret, addends, weight), (addends, weight)


def _backward(eps: float, interpret: Any, kept: Any, cotangents: Any) -> Any:
    del interpret

    def plain(addends: Any, weight: jax.Array) -> Any:
        x, *others = addends
        if not others:
            return (reference.rms_norm(x, weight, eps=eps),)
        return reference.add_rms_norm(x, others[0], weight, eps=eps)

    return jax.vjp(plain, *kept)[1](cotangents)


_norm.defvjp(_forward, _backward)
