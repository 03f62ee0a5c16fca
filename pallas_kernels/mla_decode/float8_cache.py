"""The float8 format of a cached token: 656 bytes in DeepSeek-V3 instead of bfloat16's 1,152.

====== ============ ========================================================================
bytes  dtype
====== ============ ========================================================================
512    float8_e4m3fn  the latent, in groups of 128 columns that share a scale
16     float32        one scale for each of the four groups
128    bfloat16       the rotated rope key
====== ============ ========================================================================

The sizes are those of DeepSeek-V3, which Hopper kernels require. Other models have C bytes, C / 128
scales and R rope columns. The fields are little endian and contiguous. A latent is ``value *
scale``. Rope keys stay in bfloat16: their scores depend on the position and are sensitive to
rounding, and they are only 64 of 576 numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, UInt8, UInt32

from pallas_kernels.block_quant.reference import FLOAT8, FLOAT8_MAX

LATENT, ROPE = 512, 64
GROUP = 128  # number of latent columns that share a scale
SCALES_AT = LATENT  # byte offset of the scales in a token

ROPE_AT = SCALES_AT + 4 * (LATENT // GROUP)  # byte offset of the rope key in a token
TOKEN_BYTES = ROPE_AT + 2 * ROPE


def float8_token_bytes(latent: int, rope: int) -> int:
    """Returns the bytes of a cached token with C = ``latent`` and R = ``rope`` columns.

    Raises:
      ValueError: groups of scales do not divide the latent.
    """
    if latent % GROUP:
        raise ValueError(
            f"float8 cache: expected a latent of a multiple of {GROUP} columns, got {latent}"
        )
    return latent + 4 * (latent // GROUP) + 2 * rope


def check_width(columns: tuple[int, int], width: int) -> None:
    """Raises NotImplementedError unless tokens of C and R ``columns`` take ``width`` bytes, or are
    padded to it (see ``page_width``)."""
    expected = 0 if columns[0] % GROUP else float8_token_bytes(*columns)
    if not expected or width not in (expected, -(-expected // 128) * 128):
        raise NotImplementedError(
            f"takes float8 caches of {expected or 'no'} bytes for {columns[0]} latent and"
            f" {columns[1]} rope columns, got {width}"
        )


def quantize_latent(
    latent: Float[Array, "*batch C"], rope: Float[Array, "*batch R"]
) -> UInt8[Array, "*batch bytes"]:
    """Quantizes tokens to the format that :func:`mla_decode` reads from uint8 pages.

    The scale of a group is ``amax / 448``, rounded up to bfloat16 precision so that kernels may
    convert it to bfloat16 without loss, or 1 if the group is zero. Values are ``latent / scale``
    rounded to float8_e4m3fn. Rope keys are rounded to bfloat16.
    """
    batch = latent.shape[:-1]
    groups = latent.astype(jnp.float32).reshape(*batch, -1, GROUP)
    scale = jnp.max(jnp.abs(groups), axis=-1) / FLOAT8_MAX
    # Not only 0: subnormal scales are excluded too, because compilers may flush them to 0.
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, _rounded_up(scale))
    # Clip, because float8_e4m3fn has no infinity: a value above 448 would become NaN.
    values = jnp.clip(groups / scale[..., None], -FLOAT8_MAX, FLOAT8_MAX).astype(FLOAT8)
    fields = (values, scale, rope.astype(jnp.bfloat16))
    fields = [jax.lax.bitcast_convert_type(field, jnp.uint8) for field in fields]
    return jnp.concatenate([field.reshape(*batch, -1) for field in fields], axis=-1)


def dequantize_latent(
    tokens: UInt8[Array, "*batch bytes"],
    dtype: DTypeLike = jnp.float32,
    *,
    columns: tuple[int, int] = (LATENT, ROPE),
) -> tuple[Float[Array, "*batch C"], Float[Array, "*batch R"]]:
    """Returns latents and rope keys: ``value * scale`` in float32, then cast to ``dtype``.

    Args:
      tokens: bytes past those of a token are ignored.
      columns: C and R.
    """
    (latent, rope), batch = columns, tokens.shape[:-1]
    groups, end = latent // GROUP, float8_token_bytes(latent, rope)
    rope_at = end - 2 * rope

    def field(begin: int, end: int, field_dtype: DTypeLike, *shape: int) -> jax.Array:
        raw = tokens[..., begin:end].reshape(*batch, *shape)
        return jax.lax.bitcast_convert_type(raw, field_dtype).astype(jnp.float32)

    values = field(0, latent, FLOAT8, groups, GROUP)
    scale = field(latent, rope_at, jnp.float32, groups, 4)
    latents = (values * scale[..., None]).reshape(*batch, latent)
    return latents.astype(dtype), field(rope_at, end, jnp.bfloat16, rope, 2).astype(dtype)


def _rounded_up(x: Float32[Array, "*n"]) -> Float32[Array, "*n"]:
    """Rounds up to bfloat16 precision, by bit operations because XLA may elide a pair of casts. A
    value that exceeds a bfloat16 by no more than 3 float32 ulps is rounded down to it: the excess
    comes from rounding in the division."""
    bits: UInt32[Array, "*n"] = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type((bits + 0xFFFC) & jnp.uint32(0xFFFF0000), jnp.float32)
