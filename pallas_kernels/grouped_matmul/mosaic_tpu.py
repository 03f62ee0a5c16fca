"""grouped_matmul for TPUs: a kernel that reads each matrix once, as it is stored.

XLA's own ``ragged_dot`` is a kernel on TPUs too, and JAX has another, megablox's ``gmm``. For the
first XLA copies all of DeepSeek's K-major matrices, and neither takes scales: of 32 of V3's experts
in int8, ``ragged_dot`` makes 3.1 GiB of temporaries on a v5p, where the kernel has a MiB (libtpu
0.0.42). It stays what matrices narrower than a register are left to.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.grouped_matmul import reference
from pallas_kernels.grouped_matmul.mosaic_tpu_kernel import grouped_product
from pallas_kernels.grouped_matmul.tpu_plan import Plan, choose_plan
from pallas_kernels.tpu import require_tpu

_ROWS = "bfloat16", "float32", "float8_e4m3fn"
_MATRICES = (*_ROWS, "int8", "uint8")


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: reference.Matrices,
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None = None,
    rhs_scale: Float32[Array, "G Nb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
    plan: Plan | None = None,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """grouped_matmul on a TPU, of rows in bfloat16 or float32, float32 in full precision.

    Float8 rows become bfloat16, times their scales, before: that rounds them once more. Quantized
    matrices of many rows are rounded to the rows' dtype with their scales.

    Gradients are those of the reference.

    Raises:
      NotImplementedError: no TPU, other dtypes, or what :func:`tpu_plan.choose_plan` refuses.
    """
    chip = require_tpu(interpret)
    if 0 in (lhs.size, rhs.size):
        raise NotImplementedError(f"takes no empty arrays, got {lhs.shape} by {rhs.shape}")
    if lhs.dtype not in _ROWS or rhs.dtype not in _MATRICES:
        raise NotImplementedError(
            f"takes rows in {', '.join(_ROWS)} and matrices in {', '.join(_MATRICES)}, got"
            f" {lhs.dtype} and {rhs.dtype}"
        )
    if lhs_scale is not None:
        lhs = reference.dense_rows(lhs, lhs_scale, block_shape).astype(jnp.bfloat16)
    plan = plan or choose_plan(chip, lhs, rhs, rhs_scale, block_shape)
    return _grouped_matmul((plan, interpret), lhs, rhs, group_sizes, rhs_scale)


_Settings = tuple[Plan, Any]  # the blocks, how to interpret the kernel


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(
    settings: _Settings,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    rhs_scale: jax.Array | None,
) -> jax.Array:
    plan, interpret = settings
    return grouped_product(lhs, rhs, group_sizes, rhs_scale, plan=plan, interpret=interpret)


def _forward(settings: _Settings, *args: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _grouped_matmul(settings, *args), args


def _backward(settings: _Settings, args: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, group_sizes, rhs_scale = args
    of_lhs, of_rhs, _, _, of_scale = reference.gradients(
        (lhs, rhs, group_sizes, None, rhs_scale), cotangent, block_shape=settings[0].block_shape
    )
    return of_lhs, of_rhs, None, of_scale


_grouped_matmul.defvjp(_forward, _backward)
