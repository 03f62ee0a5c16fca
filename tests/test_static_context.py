"""A prefill chunk with a static bound of its context gives what the loop over the context gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.kv_cache import LatentKVCache, TokenBatch
from dsv3_jax.layers import attention
from dsv3_jax.model import DeepSeekV3
from sharding import make_layout
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint

PAGE, MAX_LEN = 4, 48
CACHED = np.array([0, 5, 11, 23], np.int32)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    config = tiny_config(num_hidden_layers=2)
    write_checkpoint(path, config, random_tensors(config))
    return path


def extend(model: DeepSeekV3, context: int | None, cached: np.ndarray = CACHED):
    """Hidden states and pages after a chunk of 6 tokens, behind ``cached`` others."""
    random = np.random.default_rng(1)
    cache = LatentKVCache.init(
        model.cache_spec(), len(cached), MAX_LEN, page_size=PAGE, layout=model.layout
    )
    before = jnp.asarray(random.integers(2, 100, (len(cached), 24)), jnp.int32)
    chunk = jnp.asarray(random.integers(2, 100, (len(cached), 6)), jnp.int32)

    @jax.jit
    def run(cache: LatentKVCache):
        _, cache = model.extend(before, jnp.asarray(cached), cache, "expanded")
        counts = jnp.full((len(cached),), 6, jnp.int32)
        batch = TokenBatch(chunk, counts, cache.sequences, "expanded", context)
        (hidden,), pool, _ = model.extend_batches([batch], cache.pool)
        return hidden.post_norm, pool

    hidden, pool = run(cache)
    return np.asarray(hidden), [np.asarray(page) for page in jax.tree.leaves(pool)]


@pytest.fixture(scope="module")
def model(directory) -> DeepSeekV3:
    return dsv3_jax.load(directory)[0]


@pytest.fixture(scope="module")
def loop(model):
    """Results of the loop over the context."""
    return extend(model, None)


@pytest.mark.parametrize(
    ("block_tokens", "unrolled_tokens", "context"),
    [
        pytest.param(4096, 4096, 23, marks=pytest.mark.slow),  # one block
        pytest.param(48, 4096, MAX_LEN, marks=pytest.mark.slow),  # four blocks of 12 tokens each
        (16, 4096, MAX_LEN),  # four blocks, although twelve of the default size are needed
        (48, 20, MAX_LEN),  # a loop
    ],
)
def test_equals_the_loop(model, loop, monkeypatch, block_tokens, unrolled_tokens, context):
    monkeypatch.setattr(attention, "_CONTEXT_TOKENS", block_tokens)
    monkeypatch.setattr(attention, "_UNROLLED_TOKENS", unrolled_tokens)
    hidden, pages = extend(model, context)
    expected, expected_pages = loop
    np.testing.assert_allclose(hidden, expected, atol=2e-6)
    for page, wanted in zip(pages, expected_pages, strict=True):
        np.testing.assert_allclose(page, wanted, atol=2e-6)


@pytest.mark.slow
def test_no_context(model):
    none = np.zeros(4, np.int32)
    np.testing.assert_array_equal(extend(model, 0, none)[0], extend(model, None, none)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp_attention_ep", "context_parallel"])
def test_on_a_mesh(directory, loop, name):
    layout = make_layout(name, devices=jax.devices()[:4])
    model = dsv3_jax.load(directory, layout=layout)[0]
    np.testing.assert_allclose(extend(model, 24)[0], loop[0], atol=2e-5)
