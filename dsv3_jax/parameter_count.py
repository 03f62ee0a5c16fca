"""Counts the parameters of a model that is built."""

from __future__ import annotations

import math

import jax.numpy as jnp
from flax import nnx

from dsv3_jax.model import DeepSeekV3


def parameter_count(model: DeepSeekV3, *, mtp: bool = False) -> int:
    """Returns the number of parameters of the main model, or of the MTP layers alone.

    Scales, replicas of experts, and precomputed arrays do not count.
    """
    count = 0
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        is_scale = path[-1] in ("weight_scale_inv", "weight_scale")
        if not isinstance(variable, nnx.Variable) or is_scale or (path[0] == "mtp") != mtp:
            continue
        shape = variable.shape
        if "experts" in path:
            shape = (model.config.n_routed_experts, *shape[1:])
        # A byte holds two int4.
        count += math.prod(shape) * (2 if variable.dtype == jnp.uint8 else 1)
    return count
