"""New models, with shapes instead of weights or with random weights, and the size of a model."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.on_mesh import stored_shardings
from dsv3_jax.model import DeepSeekV3
from sharding import Layout


class _SameKey(nnx.Rngs):
    """Returns the same key every time, for models that are only used for their shapes.

    With jax 0.10, counting the keys inside a trace takes time quadratic in the trace's length: a
    minute for DeepSeek-V3 in float8, compared with two seconds this way.
    """

    def params(self) -> jax.Array:
        return jax.random.key(0)


def abstract_model(config: ModelConfig, **kwargs: Any) -> DeepSeekV3:
    """Returns a model whose arrays are shapes, ``jax.ShapeDtypeStruct``. Nothing is allocated."""
    return nnx.eval_shape(lambda: DeepSeekV3(config, rngs=_SameKey(0), **kwargs))


def random_model(config: ModelConfig, seed: int, layout: Layout | None = None) -> DeepSeekV3:
    """Returns a new model in float32 with random weights. With a layout they are made on the host,
    which needs memory for all of them, and then moved to its devices. Raises ValueError or
    NotImplementedError if the model cannot be laid out so."""
    if layout is None:
        return DeepSeekV3(config, rngs=nnx.Rngs(seed))
    model = abstract_model(config)
    model.lay_out(layout)
    shardings = stored_shardings(model, layout)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        parameters = nnx.to_flat_state(nnx.state(DeepSeekV3(config, rngs=nnx.Rngs(seed))))
    sharded = []
    for path, variable in parameters:
        value = np.asarray(variable.get_value())
        array = jax.make_array_from_callback(value.shape, shardings[path], value.__getitem__)
        sharded.append((path, variable.replace(array)))
    return nnx.merge(nnx.graphdef(model), nnx.from_flat_state(sharded))


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
