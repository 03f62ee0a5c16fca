"""The specification of block_quant and block_dequant."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

FLOAT8 = jnp.float8_e4m3fn
FLOAT8_MAX = 448.0
SMALLEST_AMAX = 1e-4  # act_quant's floor: a block of zeros must not divide by zero


def scale_shape(shape: tuple[int, ...], block_shape: tuple[int, int]) -> tuple[int, ...]:
    """Shape of the scales of a [..., N, K] array: ceil, for the last block may be partial."""
    *batch, N, K = shape
    return (*batch, -(-N // block_shape[0]), -(-K // block_shape[1]))


def block_quant(
    x: Float[Array, "*batch N K"],
    block_shape: tuple[int, int] = (1, 128),
    *,
    scale_fmt: Literal["float32", "ue8m0"] = "float32",
) -> tuple[Float[Array, "*batch N K"], Float32[Array, "*batch Nb Kb"]]:
    x = x.astype(jnp.float32)
    *batch, Nb, Kb = scale_shape(x.shape, block_shape)
    bn, bk = block_shape
    N, K = x.shape[-2:]
    edges = [(0, 0)] * len(batch) + [(0, Nb * bn - N), (0, Kb * bk - K)]
    blocks = jnp.pad(x, edges).reshape(*batch, Nb, bn, Kb, bk)
    amax = jnp.max(jnp.abs(blocks), axis=(-3, -1))
    scale = jnp.maximum(amax, SMALLEST_AMAX) / FLOAT8_MAX
    if scale_fmt == "ue8m0":
        # frexp is exact where log2 may round: scale = m 2^e with m in [0.5, 1), and 2^(e-1) = scale
        # when m is 0.5.
        mantissa, exponent = jnp.frexp(scale)
        scale = jnp.ldexp(jnp.float32(1), jnp.where(mantissa == 0.5, exponent - 1, exponent))
    # Clipped because float8_e4m3fn has no infinity: a value past 448 would become NaN.
    values = jnp.clip(x / _spread(scale, block_shape, (N, K)), -FLOAT8_MAX, FLOAT8_MAX)
    return values.astype(FLOAT8), scale


def block_dequant(
    values: Float[Array, "*batch N K"],
    scale: Float32[Array, "*batch Nb Kb"],
    block_shape: tuple[int, int],
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "*batch N K"]:
    if scale.shape != (expected := scale_shape(values.shape, block_shape)):
        raise ValueError(f"scale: expected shape {expected}, got {scale.shape}")
    spread = _spread(scale, block_shape, values.shape[-2:])
    return (values.astype(jnp.float32) * spread).astype(dtype)


def _spread(
    scale: Float32[Array, "*batch Nb Kb"], block_shape: tuple[int, int], shape: tuple[int, ...]
) -> Float32[Array, "*batch N K"]:
    """Repeats each scale over its block, cut to [N, K]."""
    N, K = shape
    rows = jnp.repeat(scale, block_shape[0], axis=-2)[..., :N, :]
    return jnp.repeat(rows, block_shape[1], axis=-1)[..., :K]
