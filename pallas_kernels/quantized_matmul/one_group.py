"""quantized_matmul as a grouped matmul of one group."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels.quantized_matmul.reference import Matrix


def multiply_as_one_group(
    grouped_matmul: Callable[..., Float[Array, "M N"]],
    x: Float[Array, "*batch K"],
    weight: Matrix,
    scale: Float32[Array, "Nb Kb"],
    *,
    block_shape: tuple[int, int],
    out_dtype: DTypeLike,
    interpret: Any,
) -> Float[Array, "*batch N"]:
    """Flattens the batch to rows of one group, and calls a back-end of grouped_matmul."""
    M = math.prod(x.shape[:-1])
    out = grouped_matmul(
        x.reshape(M, x.shape[-1]),
        weight[None],
        jnp.full((1,), M, jnp.int32),
        rhs_scale=scale[None],
        block_shape=block_shape,
        interpret=interpret,
    )
    return out.reshape(*x.shape[:-1], weight.shape[0]).astype(out_dtype)
