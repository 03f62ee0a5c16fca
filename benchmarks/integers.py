"""Random integer weights whose mean is 0.

Bits drawn alike have a mean of -0.5: every matrix then has a direction in common, along which
activations grow until all rows are routed to the same experts.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

# Root mean square of all values but the least, which is a 0 more.
INT8_RMS = math.sqrt(sum(x * x for x in range(-127, 128)) / 256)
INT4_RMS = math.sqrt(sum(x * x for x in range(-7, 8)) / 16)


def random_int8(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """int8, from -127 to 127."""
    bits = jax.random.bits(key, shape, jnp.uint8)
    return jax.lax.bitcast_convert_type(jnp.where(bits == 128, 0, bits), jnp.int8)


def random_int4(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """uint8 of two int4 each, from -7 to 7."""
    bits = jax.random.bits(key, shape, jnp.uint8)
    low, high = bits & 15, bits & 240
    return jnp.where(low == 8, 0, low) | jnp.where(high == 128, 0, high)
