"""The router and the sums of experts are float32, whatever the model's dtype.

A float32 matmul at JAX's default precision may run in TF32 on a GPU. So these tests read the
precision that the lowered program requests.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from dsv3_jax import ModelConfig
from dsv3_jax.initialization import abstract_model
from dsv3_jax.kv_cache import LatentKVCache
from tests.support.checkpoints import tiny_config

CONFIG = ModelConfig.from_hf(tiny_config(num_hidden_layers=1, first_k_dense_replace=0))


def matmuls(dtype) -> list[tuple[str, str]]:
    """Precision and operand types of every matmul of a pass over whole sequences, MTP layers
    included, and of a decode step."""
    graph, state = nnx.split(abstract_model(CONFIG, dtype=dtype))

    def run(state, tokens):
        model = nnx.merge(graph, state)
        cache = LatentKVCache.init(model.cache_spec(), 2, 64)
        step = model.extend(tokens[:, :2], jnp.full((2,), 2, jnp.int32), cache, "absorbed")
        return model(tokens, return_aux=True), step[0]

    lowered = jax.jit(run).lower(state, jax.ShapeDtypeStruct((2, 9), jnp.int32)).as_text()
    return re.findall(
        r"stablehlo\.dot_general .*precision = \[(\w+, \w+)\].* : \((.*)\) ->", lowered
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_router_and_expert_sums_are_float32(dtype):
    precisions = matmuls(dtype)
    # Tokens are 2 x 9, in the MTP layer too, and 2 x 2, with 64 columns, 8 experts and 3 per token.
    for tokens in (18, 4):
        routers = [p for p, types in precisions if f"<{tokens}x64x" in types and "<8x64x" in types]
        sums = [
            p
            for p, types in precisions
            if types == f"tensor<{tokens}x3x64xf32>, tensor<{tokens}x3xf32>"
        ]
        assert set(routers) == set(sums) == {"HIGHEST, HIGHEST"}
    # In a bfloat16 model no other matmul has float32 inputs, which TF32 would round.
    if dtype == jnp.bfloat16:
        assert {p for p, types in precisions if "f32" in types} == {"HIGHEST, HIGHEST"}
