"""The float8 form of a cached token: 656 bytes where bfloat16 takes 1,152.

====== ============ ========================================================================
bytes  dtype
====== ============ ========================================================================
512    float8_e4m3fn  the latent; each 128 columns, a group, stand under one scale
16     float32        the four groups' scales
128    bfloat16       the rotated rope key
====== ============ ========================================================================

Little endian, one after the other. A latent is ``value * scale``; rope keys are not scaled, for
their scores turn with the position and lose more by rounding than they take in space.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, UInt8, UInt32

from pallas_kernels.block_quant.reference import FLOAT8, FLOAT8_MAX

LATENT, ROPE = 512, 64
GROUP = 128
"""Latent columns under one scale."""

SCALES_AT = LATENT
"""Of a token's bytes, where the scales begin."""

ROPE_AT = SCALES_AT + 4 * (LATENT // GROUP)
"""Where the rope key begins."""

TOKEN_BYTES = ROPE_AT + 2 * ROPE


def quantize_latent(
    latent: Float[Array, "*batch 512"], rope: Float[Array, "*batch 64"]
) -> UInt8[Array, "*batch 656"]:
    """Tokens as :func:`mla_decode` reads them out of pages of uint8.

    ``scale = amax / 448`` over a group, rounded up to 8 bits of mantissa so that kernels which hold
    it as bfloat16 lose nothing; 1 for a group of zeros. Values are ``latent / scale`` rounded to
    float8_e4m3fn; rope keys are rounded to bfloat16.
    """
    batch = latent.shape[:-1]
    groups = latent.astype(jnp.float32).reshape(*batch, LATENT // GROUP, GROUP)
    scale = jnp.max(jnp.abs(groups), axis=-1) / FLOAT8_MAX
    # Not 0 alone: what compilers flush to 0 must not divide either.
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, _rounded_up(scale))
    # Clipped because float8_e4m3fn has no infinity: a value past 448 would become NaN.
    values = jnp.clip(groups / scale[..., None], -FLOAT8_MAX, FLOAT8_MAX).astype(FLOAT8)
    parts = (values, scale, rope.astype(jnp.bfloat16))
    parts = [jax.lax.bitcast_convert_type(part, jnp.uint8) for part in parts]
    return jnp.concatenate([part.reshape(*batch, -1) for part in parts], axis=-1)


def dequantize_latent(
    tokens: UInt8[Array, "*batch 656"], dtype: DTypeLike = jnp.float32
) -> tuple[Float[Array, "*batch 512"], Float[Array, "*batch 64"]]:
    """Latents and rope keys: ``value * scale`` in float32, then cast to ``dtype``."""
    batch = tokens.shape[:-1]

    def part(begin: int, end: int, kind: DTypeLike, *shape: int) -> jax.Array:
        found = tokens[..., begin:end].reshape(*batch, *shape)
        return jax.lax.bitcast_convert_type(found, kind).astype(jnp.float32)

    groups = LATENT // GROUP
    values = part(0, SCALES_AT, FLOAT8, groups, GROUP)
    scale = part(SCALES_AT, ROPE_AT, jnp.float32, groups, 4)
    rope = part(ROPE_AT, TOKEN_BYTES, jnp.bfloat16, ROPE, 2)
    latent = (values * scale[..., None]).reshape(*batch, LATENT)
    return latent.astype(dtype), rope.astype(dtype)


def _rounded_up(x: Float32[Array, "*n"]) -> Float32[Array, "*n"]:
    """To bfloat16, not by casts, which XLA may take for superfluous.

    What lies above a bfloat16 by a rounding of float32 or two comes of dividing, and goes down.
    """
    bits: UInt32[Array, "*n"] = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type((bits + 0xFFFC) & jnp.uint32(0xFFFF0000), jnp.float32)
