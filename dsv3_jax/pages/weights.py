"""A digest of a model's config, options and weights, which all processes compute alike."""

from __future__ import annotations

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Shaped, UInt32

from dsv3_jax.model import DeepSeekV3

# Odd numbers: a product with one is a bijection of 32-bit integers.
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)


def model_digest(model: DeepSeekV3) -> str:
    """Returns a digest of everything about a model that its cached values depend on.

    It reads all weights once on the device. Models with other weights have other digests, unless
    somebody makes them collide on purpose: sums of bits are no cryptographic digest. A model may
    have another digest in another layout if its weights are arranged otherwise there; then pages
    are not exchanged.
    """
    arrays = {
        ".".join(map(str, path)): variable[...]
        for path, variable in nnx.to_flat_state(nnx.state(model))
    }
    weights = {
        # One at a time: simulated devices deadlock on collectives of programs that overlap.
        name: [str(array.dtype), list(array.shape), np.asarray(_checksum(array)).tolist()]
        for name, array in sorted(arrays.items())
    }
    float8 = [
        any(getattr(module, option, False) for _, module in nnx.iter_modules(model))
        for option in ("float8_activations", "float8_latents", "float8_keys")
    ]
    parts = [repr(model.config), str(model.dtype), float8, weights]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@jax.jit
def _checksum(array: Shaped[Array, "*_"]) -> UInt32[Array, " 2"]:
    """Returns the sum of an array's bits as 32-bit integers, and one weighted by position."""
    if jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == jnp.bool_:
        bits = array.astype(jnp.uint32)
    else:
        unsigned = np.dtype(f"u{array.dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)
    weights = jnp.ones((), jnp.uint32)
    for axis in range(array.ndim):
        index = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
        weights = (weights ^ (index * np.uint32(_FACTORS[axis % len(_FACTORS)]))) * np.uint32(
            _FACTORS[-1]
        )
    return jnp.stack([bits.sum(dtype=jnp.uint32), (bits * (weights | 1)).sum(dtype=jnp.uint32)])
