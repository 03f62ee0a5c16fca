"""Rotary positions with YaRN, exact at any position.

Angles reach 1e5 radians at the end of a 160k context, where a float32 product position * frequency
is off by up to 0.01. So no angle is formed on the device: cos and sin of positions ``256 i`` and
``j < 256`` are tabulated in float64, and ``256 i + j`` follows by the angle addition formulas.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from dsv3_jax.config import ModelConfig

_STRIDE = 256


class Rotation(NamedTuple):
    """What turns the rope dimensions of the tokens at hand; shared by all layers."""

    cos: Float32[Array, "B T R/2"]
    sin: Float32[Array, "B T R/2"]


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians a token of each rope pair, float64 [R/2].

    ``f_i = theta^(-2i/R)``. YaRN keeps pairs that turn more than beta_fast times over the original
    context, divides by ``factor`` those that turn less than beta_slow times, and blends linearly
    between (arXiv 2309.00071, section 3.2).
    """
    R, theta, yarn = config.qk_rope_head_dim, config.rope_theta, config.rope_scaling
    frequencies = theta ** (-np.arange(0, R, 2, dtype=np.float64) / R)
    if yarn is None:
        return frequencies

    def pair_turning(times: float) -> float:
        context = yarn.original_max_position_embeddings
        return R * math.log(context / (2 * math.pi * times)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_turning(yarn.beta_slow)), R - 1)
    # Kimi-K2 has beta_fast = beta_slow; were both bounds also whole, the ramp would divide by zero.
    width = high - low if high != low else 0.001
    stretched = np.clip((np.arange(R // 2) - low) / width, 0.0, 1.0)
    return frequencies * (1 - stretched) + frequencies / yarn.factor * stretched


@functools.lru_cache(maxsize=16)
def _tables(config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """exp(i angle) of the coarse and fine positions: complex64 [n, R/2] and [256, R/2]."""
    frequencies = inverse_frequencies(config)
    coarse = np.arange(0, config.max_position_embeddings + _STRIDE, _STRIDE, dtype=np.float64)
    fine = np.arange(_STRIDE, dtype=np.float64)
    yarn = config.rope_scaling
    magnitude = 1.0
    if yarn is not None:
        magnitude = yarn.magnitude(yarn.mscale) / yarn.magnitude(yarn.mscale_all_dim)
    return (
        (magnitude * np.exp(1j * coarse[:, None] * frequencies)).astype(np.complex64),
        np.exp(1j * fine[:, None] * frequencies).astype(np.complex64),
    )


def rotation(config: ModelConfig, positions: Int[Array, "B T"]) -> Rotation:
    """cos and sin of every position's angles.

    Exact below ``max_position_embeddings``. Later positions, of padding or of tokens that callers
    drop, get finite numbers that mean nothing.
    """
    coarse, fine = _tables(config)
    i, j = positions // _STRIDE, positions % _STRIDE
    cos_i, sin_i = jnp.asarray(np.real(coarse))[i], jnp.asarray(np.imag(coarse))[i]
    cos_j, sin_j = jnp.asarray(np.real(fine))[j], jnp.asarray(np.imag(fine))[j]
    return Rotation(cos_i * cos_j - sin_i * sin_j, sin_i * cos_j + cos_i * sin_j)


def rotate(x: Float[Array, "B T *heads R"], by: Rotation) -> Float[Array, "B T *heads R"]:
    """Turns the interleaved pairs (x0, x1), (x2, x3), ... of the checkpoint's layout.

    The result holds all first halves, then all second halves: queries and keys share the order, so
    their products are those of the interleaved layout, and no weight has to be permuted.
    """
    cos, sin = by
    if x.ndim == 4:
        cos, sin = cos[:, :, None], sin[:, :, None]
    first, second = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
