"""The specification of block_quant, integer_quant and block_dequant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8, UInt8

from pallas_kernels.residuals import rounded

# float8, int8, or int4 as uint8: two columns per byte, the even one in the low half.
Values = Float[Array, "*batch N K"] | Int8[Array, "*batch N K"] | UInt8[Array, "*batch N K2"]

FLOAT8 = jnp.float8_e4m3fn
FLOAT8_MAX = 448.0
SMALLEST_AMAX = 1e-4  # as in act_quant, so that a block of zeros does not divide by zero


def scale_shape(shape: tuple[int, ...], block_shape: tuple[int, int]) -> tuple[int, ...]:
    """Returns the shape of the scales of a [..., N, K] array. The last blocks may be partial."""
    *batch, N, K = shape
    return (*batch, -(-N // block_shape[0]), -(-K // block_shape[1]))


def block_quant(
    x: Float[Array, "*batch N K"],
    block_shape: tuple[int, int] = (1, 128),
    *,
    scale_fmt: Literal["float32", "ue8m0"] = "float32",
) -> tuple[Float[Array, "*batch N K"], Float32[Array, "*batch Nb Kb"]]:
    """As :func:`pallas_kernels.block_quant`."""
    x = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(_blocks(x, block_shape)), axis=(-3, -1))
    scale = jnp.maximum(amax, SMALLEST_AMAX) / FLOAT8_MAX
    if scale_fmt == "ue8m0":
        # Unlike log2, frexp is exact: scale = m 2^e with 0.5 <= m < 1. If m is 0.5, the scale is
        # already a power of two, 2^(e - 1).
        mantissa, exponent = jnp.frexp(scale)
        scale = jnp.ldexp(jnp.float32(1), jnp.where(mantissa == 0.5, exponent - 1, exponent))
    # float8_e4m3fn has no infinity: without clipping, a value above 448 would become NaN.
    values = jnp.clip(x / _spread(scale, block_shape, x.shape[-2:]), -FLOAT8_MAX, FLOAT8_MAX)
    return values.astype(FLOAT8), scale


def integer_quant(
    x: Float[Array, "*batch N K"], bits: int, group_size: int | None = None
) -> tuple[Int8[Array, "*batch N K"] | UInt8[Array, "*batch N K2"], Float32[Array, "*batch N Kb"]]:
    """As :func:`pallas_kernels.integer_quant`."""
    if bits not in (8, 4):
        raise ValueError(f"bits: expected 8 or 4, got {bits}")
    K = x.shape[-1]
    if bits == 4 and K % 2:
        raise ValueError(f"int4 packs columns in pairs: expected an even number, got {K}")
    x = x.astype(jnp.float32)
    block_shape = (1, group_size or K)
    groups = _blocks(x, block_shape)
    high, low = jnp.max(groups, axis=(-3, -1)), jnp.min(groups, axis=(-3, -1))
    # int8 does not use -128, which would help only one sign. For int4, -8 is a sixteenth of the
    # range.
    most, least = (127, -127) if bits == 8 else (7, -8)
    scale = jnp.maximum(high / most, low / least)
    # Compilers may flush subnormal scales to 0, so they are replaced too.
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    integers = jnp.rint(x / _spread(scale, block_shape, x.shape[-2:]))
    values = jnp.clip(integers, least, most).astype(jnp.int8)
    return (values if bits == 8 else _pack(values)), scale


def block_dequant(
    values: Values,
    scale: Float32[Array, "*batch Nb Kb"],
    block_shape: tuple[int, int],
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "*batch N K"]:
    """As :func:`pallas_kernels.block_dequant`."""
    if values.dtype == jnp.uint8:
        values = _unpack(values)
    if scale.shape != (expected := scale_shape(values.shape, block_shape)):
        raise ValueError(f"scale: expected shape {expected}, got {scale.shape}")
    spread = _spread(scale, block_shape, values.shape[-2:])
    return (values.astype(jnp.float32) * spread).astype(dtype)


def after(array: Array, scale: Float32[Array, "*batch Nb Kb"]) -> Float32[Array, "*batch Nb Kb"]:
    """Returns the scales of a matrix, which are known only after ``array``.

    Compilers would otherwise dequantize the weights of all layers first, and use the result of the
    forward pass in the backward pass: a second copy of all weights. They drop barriers before they
    schedule, but do not see that no number is both zero and NaN."""
    first = array[(0,) * array.ndim]
    return scale * jnp.where((first == 0) & (first != first), 0.0, 1.0)


def multiply_dequantized(
    matmul: Callable[..., Array],
    values: Values,
    scale: Float32[Array, "*batch Nb Kb"],
    block_shape: tuple[int, int],
    dtype: DTypeLike,
    x: Array,
    *arrays: Array,
) -> Array:
    """Returns ``matmul(dense, x, *arrays)``, where ``dense`` are the values times their scales in
    ``dtype``. The backward pass dequantizes again. It is linear in ``x``, so that the result of the
    forward pass, which it computes again, is of no use to it and compilers drop it."""

    def multiply(values: Values, scale: Array, x: Array, *arrays: Array) -> Array:
        return matmul(block_dequant(values, scale, block_shape, dtype), x, *arrays)

    def forward(values: Values, scale: Array, x: Array, *arrays: Array) -> tuple[Array, Any]:
        out = multiply(values, after(x, scale), x, *arrays)
        return rounded(out), (values, scale, x, *arrays)

    def backward(saved: tuple[Array, ...], cotangent: Array) -> Any:
        values, scale, *arrays = saved
        return jax.vjp(multiply, values, after(cotangent, scale), *arrays)[1](cotangent)

    call: Any = jax.custom_vjp(multiply)
    call.defvjp(forward, backward)
    return call(values, scale, x, *arrays)


def _pack(values: Int8[Array, "*batch N K"]) -> UInt8[Array, "*batch N K2"]:
    bits = jax.lax.bitcast_convert_type(values, jnp.uint8)
    return (bits[..., ::2] & 15) | (bits[..., 1::2] << 4)


def _unpack(values: UInt8[Array, "*batch N K2"]) -> Int8[Array, "*batch N K"]:
    signed = jax.lax.bitcast_convert_type(values, jnp.int8)
    # Shifting left first and then right extends the sign of the low half.
    pairs = (signed[..., None] << jnp.array([4, 0], jnp.int8)) >> 4
    return pairs.reshape(*values.shape[:-1], -1)


def _blocks(
    x: Float32[Array, "*batch N K"], block_shape: tuple[int, int]
) -> Float32[Array, "*batch Nb rows Kb columns"]:
    """Divides x into blocks. The last ones are padded with zeros."""
    *batch, Nb, Kb = scale_shape(x.shape, block_shape)
    bn, bk = block_shape
    N, K = x.shape[-2:]
    edges = [(0, 0)] * len(batch) + [(0, Nb * bn - N), (0, Kb * bk - K)]
    return jnp.pad(x, edges).reshape(*batch, Nb, bn, Kb, bk)


def _spread(
    scale: Float32[Array, "*batch Nb Kb"], block_shape: tuple[int, int], shape: tuple[int, ...]
) -> Float32[Array, "*batch N K"]:
    """Repeats each scale over its block, and truncates to [N, K]."""
    N, K = shape
    rows = jnp.repeat(scale, block_shape[0], axis=-2)[..., :N, :]
    return jnp.repeat(rows, block_shape[1], axis=-1)[..., :K]
