"""Models with random weights from NumPy, which need no compilation."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import abstract_model
from dsv3_jax.layers.logical_axes import parameter_shardings
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import Quantization
from sharding import Layout


def filled_model(
    config: ModelConfig, quantization: Quantization | None = None, layout: Layout | None = None
) -> DeepSeekV3:
    """Returns a float32 model with normal weights. Quantised weights are random bytes."""
    rng = np.random.default_rng(0)
    model = abstract_model(config, quantization=quantization)
    shardings = None
    if layout is not None:
        model.lay_out(layout)
        shardings = parameter_shardings(model, layout.mesh, layout.rules, quantization)
    graph, state = nnx.split(model)
    filled = []
    for path, variable in nnx.to_flat_state(state):
        want = variable.get_value()
        if want.dtype == jnp.float32:
            value = rng.normal(0.0, 0.1, want.shape).astype(np.float32)
        else:
            value = rng.integers(0, 100, want.shape, np.uint8).view(want.dtype)
        sharding = None if shardings is None else shardings[path]
        filled.append((path, variable.replace(jax.device_put(value, sharding))))
    return nnx.merge(graph, nnx.from_flat_state(filled))
