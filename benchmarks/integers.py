"""Random integer weights with mean 0.

Uniformly random bits have a mean of -0.5. All matrices would then share a direction, along which
activations grow until all tokens are routed to the same experts.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

# Root mean square of the values. The most negative value is replaced by 0.
INT8_RMS = math.sqrt(sum(x * x for x in range(-127, 128)) / 256)
INT4_RMS = math.sqrt(sum(x * x for x in range(-7, 8)) / 16)


def random_int8(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns random int8 from -127 to 127."""
    bits = jax.random.bits(key, shape, jnp.uint8)
    return jax.lax.bitcast_convert_type(jnp.where(bits == 128, 0, bits), jnp.int8)


def random_int4(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns random int4 from -7 to 7, two of them packed in each uint8."""
    bits = jax.random.bits(key, shape, jnp.uint8)
    low, high = bits & 15, bits & 240
    return jnp.where(low == 8, 0, low) | jnp.where(high == 128, 0, high)
