"""grouped_matmul for TPUs: a Pallas kernel that reads each matrix once, in its stored format.

XLA's own ``ragged_dot`` is a kernel on TPUs too, and JAX has another, megablox's ``gmm``. Neither
supports scales, and for ``ragged_dot`` XLA copies all of DeepSeek's K-major matrices: for 32 of
V3's experts in int8 on a v5p it allocates 3.1 GiB of temporaries, and this kernel 1 MiB (libtpu
0.0.42). Matrices narrower than a register are still left to ``ragged_dot``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.grouped_matmul import mosaic_tpu_kernel, reference
from pallas_kernels.grouped_matmul.tpu_plan import Plan, choose_plan
from pallas_kernels.tpu import require_tpu

_LHS_DTYPES = "bfloat16", "float32", "float8_e4m3fn"
_RHS_DTYPES = (*_LHS_DTYPES, "int8", "uint8")


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
    """grouped_matmul on a TPU, with rows in bfloat16 or float32. float32 has full precision.

    float8 rows are first multiplied by their scales and rounded to bfloat16, one rounding more than
    the reference has. With many rows per group, quantized matrices are multiplied by their scales
    and rounded to the dtype of the rows.

    Gradients are computed by the reference.

    Raises:
      NotImplementedError: no TPU, other dtypes, or what :func:`tpu_plan.choose_plan` refuses.
    """
    chip = require_tpu(interpret)
    if 0 in (lhs.size, rhs.size):
        raise NotImplementedError(f"takes no empty arrays, got {lhs.shape} by {rhs.shape}")
    if lhs.dtype not in _LHS_DTYPES or rhs.dtype not in _RHS_DTYPES:
        raise NotImplementedError(
            f"takes rows in {', '.join(_LHS_DTYPES)} and matrices in {', '.join(_RHS_DTYPES)}, got"
            f" {lhs.dtype} and {rhs.dtype}"
        )
    if lhs_scale is not None:
        lhs = reference.dense_rows(lhs, lhs_scale, block_shape).astype(jnp.bfloat16)
    plan = plan or choose_plan(chip, lhs, rhs, rhs_scale, block_shape)
    return _grouped_matmul((plan, interpret), lhs, rhs, group_sizes, rhs_scale)


_Settings = tuple[Plan, Any]  # block sizes, interpreter parameters


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(
    settings: _Settings,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    rhs_scale: jax.Array | None,
) -> jax.Array:
    plan, interpret = settings
    return mosaic_tpu_kernel.matmul(
        lhs, rhs, group_sizes, rhs_scale, plan=plan, interpret=interpret
    )


def _forward(settings: _Settings, *args: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _grouped_matmul(settings, *args), args


def _backward(settings: _Settings, args: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, group_sizes, rhs_scale = args
    d_lhs, d_rhs, _, _, d_scale = reference.gradients(
        (lhs, rhs, group_sizes, None, rhs_scale), cotangent, block_shape=settings[0].block_shape
    )
    return d_lhs, d_rhs, None, d_scale


_grouped_matmul.defvjp(_forward, _backward)
