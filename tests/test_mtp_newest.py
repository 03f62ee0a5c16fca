"""``extend_mtp(newest_only=True)`` equals the last valid position of the whole extension."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.config import ModelConfig
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.model import DeepSeekV3
from sharding import make_layout
from tests.support.checkpoints import tiny_config

PAGE, T, D = 4, 3, 64
STARTS = jnp.array([5, 0, 9, 14], jnp.int32)
COUNTS = jnp.array([3, 1, 0, 3], jnp.int32)  # the last sequence has space for two
CONFIG = tiny_config(num_hidden_layers=1)
SPARSE = CONFIG | {
    "model_type": "deepseek_v32",
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 4,
}


def extended(config, layout_name, form, *, newest_only):
    layout = layout_name and make_layout(layout_name, devices=jax.devices()[:2])
    model = DeepSeekV3(ModelConfig.from_hf(config), rngs=nnx.Rngs(0), dtype=jnp.float32)
    if layout:
        model.lay_out(layout)
    spec = model.cache_spec(mtp=True)
    empty = LatentKVCache.init(spec, 4, 16, page_size=PAGE, layout=layout)
    # Keys of earlier tokens that are not zero.
    pages = jax.tree.map(
        lambda p: jax.random.normal(jax.random.key(1), p.shape).astype(p.dtype), empty.pool.mtp
    )
    cache = dataclasses.replace(empty, pool=dataclasses.replace(empty.pool, mtp=pages))
    hidden = jax.random.normal(jax.random.key(2), (4, T, D))
    tokens = jax.random.randint(jax.random.key(3), (4, T), 2, 100)
    graph, state = nnx.split(model)
    # Lowering unflattens trees into descriptions of arrays, which the cache's classes refuse.
    leaves, structure = jax.tree.flatten((state, cache, STARTS, COUNTS))

    @jax.jit
    def run(leaves):
        state, cache, starts, counts = jax.tree.unflatten(structure, leaves)
        model = nnx.merge(graph, state)
        return model.extend_mtp(
            hidden, tokens, starts, counts, cache, form, newest_only=newest_only
        )

    return run(leaves), run.lower(leaves).compile()


@pytest.mark.parametrize(
    ("config", "layout", "form"),
    [
        (CONFIG, None, "absorbed"),
        (CONFIG, None, "expanded"),
        (SPARSE, None, "absorbed"),
        pytest.param(CONFIG, "context_parallel", "absorbed", marks=pytest.mark.slow),
        pytest.param(CONFIG, "dp_attention_ep", "absorbed", marks=pytest.mark.slow),
    ],
)
def test_the_newest_position(config, layout, form):
    (whole, whole_cache), long = extended(config, layout, form, newest_only=False)
    (newest, cache), short = extended(config, layout, form, newest_only=True)
    assert newest.post_norm.shape == (4, 1, D)
    for sequence, count in enumerate([3, 1, 0, 2]):
        if not count:
            continue
        for got, want in zip(newest, whole, strict=True):
            np.testing.assert_allclose(
                got[sequence, 0], want[sequence, count - 1], rtol=2e-5, atol=2e-5
            )
    for got, want in zip(*map(jax.tree.leaves, (cache.pool, whole_cache.pool)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(cache.lengths, whole_cache.lengths)
    if layout is None:
        assert short.cost_analysis()["flops"] < 0.75 * long.cost_analysis()["flops"]
