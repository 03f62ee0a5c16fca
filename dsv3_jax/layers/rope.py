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
    """Positions of the current tokens, as attention takes them: cos and sin of the rotary angles,
    and in training the beginnings of documents. All layers share them."""

    cos: Float32[Array, "B T R/2"]
    sin: Float32[Array, "B T R/2"]
    first_keys: Int[Array, "B T"] | None = None
    """First position that each token of whole sequences attends to; None for 0. Angles are those
    of positions in the sequence: scores depend on differences of positions only."""


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Returns the angle per position of each rope pair, in radians: float64 [R/2].

    ``f_i = theta^(-2i/R)``. YaRN does not change pairs with more than beta_fast rotations over the
    original context, divides the frequency of those with less than beta_slow by ``factor``, and
    interpolates linearly between (arXiv 2309.00071, section 3.2).
    """
    R, theta, yarn = config.qk_rope_head_dim, config.rope_theta, config.rope_scaling
    frequencies = theta ** (-np.arange(0, R, 2, dtype=np.float64) / R)
    if yarn is None:
        return frequencies

    def pair_with(rotations: float) -> float:
        context = yarn.original_max_position_embeddings
        return R * math.log(context / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with(yarn.beta_slow)), R - 1)
    # Kimi-K2 has beta_fast = beta_slow; if both bounds were whole too, width would be zero.
    width = high - low if high != low else 0.001
    stretched = np.clip((np.arange(R // 2) - low) / width, 0.0, 1.0)
    return frequencies * (1 - stretched) + frequencies / yarn.factor * stretched


@functools.lru_cache(maxsize=16)
def _tables(config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns exp(i angle) of the coarse and fine positions, complex64 [n, R/2] and [256, R/2]."""
    frequencies = inverse_frequencies(config)
    coarse = np.arange(0, config.max_position_embeddings + _STRIDE, _STRIDE, dtype=np.float64)
    fine = np.arange(_STRIDE, dtype=np.float64)
    yarn = config.rope_scaling
    magnitude = 1.0
    if yarn is not None:
        magnitude = yarn.rotary_magnitude
    return (
        (magnitude * np.exp(1j * coarse[:, None] * frequencies)).astype(np.complex64),
        np.exp(1j * fine[:, None] * frequencies).astype(np.complex64),
    )


def rotation_at(config: ModelConfig, positions: Int[Array, "B T"]) -> Rotation:
    """Returns cos and sin of the angles of every position. They are exact below
    ``max_position_embeddings``; those of later positions, of padding, are finite but
    meaningless."""
    coarse, fine = _tables(config)
    i, j = positions // _STRIDE, positions % _STRIDE
    cos_i, sin_i = jnp.asarray(np.real(coarse))[i], jnp.asarray(np.imag(coarse))[i]
    cos_j, sin_j = jnp.asarray(np.real(fine))[j], jnp.asarray(np.imag(fine))[j]
    return Rotation(cos_i * cos_j - sin_i * sin_j, sin_i * cos_j + cos_i * sin_j)


def rotate(
    x: Float[Array, "B T *heads R"], rotation: Rotation, *, interleaved: bool = True
) -> Float[Array, "B T *heads R"]:
    """Rotates the pairs of the checkpoint's layout: (x0, x1), (x2, x3), ..., or, in the indexer of
    DeepSeek-V3.2, which is not ``interleaved``, (x0, x_{R/2}), (x1, x_{R/2 + 1}), ...

    The result holds the first elements of all pairs, then the second ones. Queries and keys share
    this order, so their dot products equal those of the checkpoint's layout, and no weight has to
    be permuted.
    """
    cos, sin, _ = rotation
    if x.ndim == 4:
        cos, sin = cos[:, :, None], sin[:, :, None]
    pairs = (x[..., 0::2], x[..., 1::2]) if interleaved else jnp.split(x, 2, axis=-1)
    first, second = (each.astype(jnp.float32) for each in pairs)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
