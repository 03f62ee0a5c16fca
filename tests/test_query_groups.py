"""A prefill chunk in absorbed form, in groups of queries, equals the expanded form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.layers import cached_attention
from dsv3_jax.model import DeepSeekV3
from sharding import make_layout
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint

PAGE, MAX_LEN, T = 4, 64, 22  # three groups, the last one not full
CACHED = np.array([0, 5, 11, 23], np.int32)
COUNTS = np.array([22, 9, 0, 8], np.int32)  # all groups, parts of two, none, one


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    config = tiny_config(num_hidden_layers=2)
    write_checkpoint(path, config, random_tensors(config))
    return path


@pytest.fixture(scope="module")
def model(directory) -> DeepSeekV3:
    return dsv3_jax.load(directory)[0]


def extend(model: DeepSeekV3, form: str):
    """Hidden states of a chunk behind cached tokens, of the MTP layer too, and the pages."""
    random = np.random.default_rng(1)
    spec = model.cache_spec(mtp=True)
    cache = LatentKVCache.init(spec, len(CACHED), MAX_LEN, page_size=PAGE, layout=model.layout)
    before = jnp.asarray(random.integers(2, 100, (len(CACHED), 24)), jnp.int32)
    chunk = jnp.asarray(random.integers(2, 100, (len(CACHED), T)), jnp.int32)

    @jax.jit
    def run(cache: LatentKVCache):
        starts, counts = jnp.asarray(CACHED), jnp.asarray(COUNTS)
        hidden, cache = model.extend(before, starts, cache, "expanded")
        _, cache = model.extend_mtp(hidden.post_norm, before, 0 * starts, starts, cache, "expanded")
        hidden, cache = model.extend(chunk, counts, cache, form)
        drafted, cache = model.extend_mtp(hidden.post_norm, chunk, starts, counts, cache, form)
        return hidden.post_norm, drafted.post_norm, cache.pool

    *hidden, pool = run(cache)
    is_token = np.arange(T) < COUNTS[:, None]
    return [np.asarray(x)[is_token] for x in hidden], list(map(np.asarray, jax.tree.leaves(pool)))


@pytest.fixture(scope="module")
def expanded(model):
    return extend(model, "expanded")


def check(actual, expected, atol: float):
    for got, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, atol=atol)


def test_equals_the_expanded_form(model, expanded):
    check(extend(model, "absorbed"), expanded, 5e-6)


@pytest.mark.slow
def test_on_a_mesh(directory, expanded):
    layout = make_layout("dp_attention_ep", devices=jax.devices()[:4])
    hidden, _ = extend(dsv3_jax.load(directory, layout=layout)[0], "absorbed")
    check(hidden, expanded[0], 2e-5)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 22])
def test_groups_are_joined_again(tokens):
    x = np.arange(3 * tokens * 2).reshape(3, tokens, 2)
    groups = cached_attention.split_groups(jnp.asarray(x))
    assert groups.shape[0] == 3 * cached_attention.num_groups(tokens)
    assert groups.shape[1] <= cached_attention.GROUP_TOKENS
    np.testing.assert_array_equal(cached_attention.join_groups(groups, tokens), x)


def test_a_group_ends_with_its_own_tokens():
    tables = jnp.arange(6).reshape(2, 3)
    valid = jnp.arange(T) < jnp.asarray([17, 8])[:, None]
    pages, lengths = cached_attention.group_tables(tables, jnp.asarray([5, 0]), valid)
    assert lengths.tolist() == [13, 21, 29, 8, 0, 0]
    np.testing.assert_array_equal(pages, np.repeat(tables, 3, axis=0))
