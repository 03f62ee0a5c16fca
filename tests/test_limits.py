"""Tokens and positions past a limit: refused if they are known, dropped otherwise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax import ModelConfig
from dsv3_jax.initialization import abstract_model
from dsv3_jax.inspection import capture
from dsv3_jax.kv_cache import CacheSpec, LatentKVCache, SequenceTables
from dsv3_jax.layers.paged_cache import write, write_scaled
from dsv3_jax.model import DeepSeekV3
from sharding import make_layout
from tests.support.checkpoints import tiny_config
from tests.support.filled import filled_model

PAGE, CAPACITY = 4, 8
CONFIG = ModelConfig.from_hf(tiny_config(num_hidden_layers=1))  # dense; the MTP layer has experts
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 160, (2, 4)), jnp.int32)
STARTS = jnp.array([6, 2], jnp.int32)
MODEL = abstract_model(CONFIG)  # refuses before it computes
SPEC = CacheSpec.of_config(CONFIG, jnp.float32)


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2]], r"expected an array \[B, T\], got list"),
        (np.arange(3), r"expected shape \[B, T\], got \(3,\)"),
        (np.zeros((2, 0), int), r"expected at least one token, got shape \(2, 0\)"),
        (np.zeros((0, 2), int), r"expected at least one token, got shape \(0, 2\)"),
        (np.zeros((1, 2)), "expected integers, got float64"),
        (np.zeros((1, 2), bool), "expected integers, got bool"),
        (jnp.array([[3, 999999]]), "expected ids from 0 to 159, got 999999"),
        (jnp.array([[3, 160]]), "expected ids from 0 to 159, got 160"),
        (jnp.array([[3, -1]]), "expected ids from 0 to 159, got -1"),
        (
            np.zeros((1, 129), int),
            r"expected 1 to 128 \(max_position_embeddings\) per sequence, got 129",
        ),
    ],
)
@pytest.mark.usefixtures("untyped")
def test_invalid_tokens(tokens, message):
    with pytest.raises(ValueError, match=rf"\Atokens: {message}\Z"):
        MODEL(tokens)
    with pytest.raises(ValueError, match=rf"\Atokens: {message}\Z"):
        capture(MODEL, tokens, "hidden")


@pytest.mark.parametrize("layers", [1, 2])
def test_sequences_too_short_for_the_mtp_layers(layers):
    """Layer k predicts T - 1 - k tokens; the last layer must predict at least one."""
    model = abstract_model(dataclasses.replace(CONFIG, num_nextn_predict_layers=layers))

    def shapes(T: int):
        tokens = jax.ShapeDtypeStruct((1, T), jnp.int32)
        return nnx.eval_shape(
            lambda model, t: model(t, return_aux=True)[1].mtp_logits, model, tokens
        )

    assert shapes(layers + 1)[-1].shape == (1, 1, 160)
    message = f"^tokens: expected {layers + 1} to 128 .* for {layers} MTP layers, got {layers}\n"
    with pytest.raises(ValueError, match=message):
        shapes(layers)
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    assert nnx.eval_shape(lambda model, t: model(t), model, tokens).shape == (1, 1, 160)


def test_batches_of_another_size_than_the_cache():
    cache = LatentKVCache.init(SPEC, 3, CAPACITY)
    message = (
        r"^tokens, starts, counts: expected 3 sequences as the cache has, got shapes \(1, 2\),"
    )
    with pytest.raises(ValueError, match=message):
        MODEL.extend(jnp.zeros((1, 2), jnp.int32), jnp.zeros((1,), jnp.int32), cache, "absorbed")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 8), "batch: expected 1 or more, got 0"),
        ((8, 0), "max_len: expected 1 or more, got 0"),
        ((3, 8), "batch: expected a multiple of 8 devices, got 3"),
    ],
)
def test_invalid_cache_sizes(sizes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        LatentKVCache.init(SPEC, *sizes, layout=make_layout("dp_attention_ep"))


def test_a_spec_of_a_config_is_that_of_its_models():
    model = abstract_model(CONFIG, dtype=jnp.bfloat16)
    for mtp in (False, True):
        spec = CacheSpec.of_config(CONFIG, jnp.bfloat16, mtp=mtp)
        assert spec == model.cache_spec(mtp=mtp)
        assert (len(spec.layers), len(spec.mtp)) == (1, int(mtp))


# ---- dropped -------------------------------------------------------------------------------------


def cache_of(model: DeepSeekV3) -> LatentKVCache:
    """Fills pages with ones, so that every write shows."""
    spec = model.cache_spec(mtp=True)
    empty = LatentKVCache.init(spec, 2, CAPACITY, page_size=PAGE, layout=model.layout)
    pool = jax.tree.map(jnp.ones_like, empty.pool)
    return dataclasses.replace(empty, pool=pool).with_lengths(STARTS)


@functools.partial(jax.jit, static_argnums=(0, 4))
def extend_both(graph, state, counts, cache, form):
    """Extends the model and its MTP layer by the same tokens."""
    model = nnx.merge(graph, state)
    starts = cache.lengths
    hidden, cache = model.extend(TOKENS, counts, cache, form)
    mtp_hidden, cache = model.extend_mtp(hidden.post_norm, TOKENS, starts, counts, cache, form)
    return hidden.post_norm, mtp_hidden.post_norm, cache


@pytest.mark.parametrize(
    ("form", "layout", "reach"),
    [
        ("absorbed", None, 128),
        pytest.param("expanded", None, 128, marks=pytest.mark.slow),
        pytest.param("absorbed", "context_parallel", 128, marks=pytest.mark.slow),
        ("absorbed", None, 8),  # pages with space for more tokens: see below
    ],
)
def test_tokens_past_the_capacity_are_dropped(form, layout, reach):
    """Two sequences of two pages. The first has two slots left and gets four tokens. The result
    equals that of two tokens and two padding tokens, in every page and for the other sequence.
    """
    devices = jax.devices()[:2]
    config = dataclasses.replace(CONFIG, max_position_embeddings=reach)
    model = filled_model(config, layout=layout and make_layout(layout, devices=devices))
    graph, state = nnx.split(model)
    cache = cache_of(model)
    if reach < 128:  # a third page: the limit is that of positions
        tables = jnp.concatenate([cache.block_tables, jnp.array([[4], [5]])], axis=1)
        cache = LatentKVCache(
            pool=jax.tree.map(lambda p: jnp.concatenate([p, jnp.ones_like(p[:2])]), cache.pool),
            sequences=SequenceTables(tables.astype(jnp.int32), cache.lengths),
        )
    want = extend_both(graph, state, jnp.array([2, 4], jnp.int32), cache, form)
    got = extend_both(graph, state, jnp.array([4, 4], jnp.int32), cache, form)
    pages, wanted = (jax.tree.leaves(cache.pool) for cache in (got[2], want[2]))
    for x, y in zip(pages, wanted, strict=True):
        np.testing.assert_array_equal(x, y)
        assert (np.asarray(x) != 1).any(-1).sum() == 2 + 4
    for x, y in zip(got[:2], want[:2], strict=True):
        np.testing.assert_array_equal(x[0, :2], y[0, :2])
        np.testing.assert_array_equal(x[1], y[1])
        assert np.isfinite(x).all()
    assert got[2].lengths.tolist() == [10, 6]  # which shows that two were dropped
    # The next step of a sequence without room writes nothing, and the other sequence is not
    # affected.
    after, other = (
        extend_both(graph, state, jnp.array([n, 1], jnp.int32), got[2], form) for n in (4, 0)
    )
    jax.tree.map(np.testing.assert_array_equal, after[2].pool.layers, other[2].pool.layers)
    np.testing.assert_array_equal(after[0][1, 0], other[0][1, 0])
    with pytest.raises(ValueError, match=r"^cache: expected .* at most 8 tokens \(.*\), got 10$"):
        model.extend(TOKENS, jnp.array([4, 4], jnp.int32), cache, form)
    with pytest.raises(ValueError, match=r"^cache: expected .* at most 8 tokens \(.*\), got 10$"):
        model.extend_mtp(want[0], TOKENS, STARTS, jnp.array([4, 4], jnp.int32), cache, form)


def test_a_write_changes_only_its_own_slots():
    """Nothing is written past the table's end, for padding, or through entries that name no
    page."""
    pages = jnp.zeros((5, PAGE, 3))
    tables = jnp.array([[1, 3], [2, -1], [5, 0]], jnp.int32)  # -1 and 5: no page yet
    positions = jnp.array([[7, 8, 40], [3, 4, 5], [0, 3, 4]], jnp.int32)
    valid = jnp.array([[True, True, True], [True, True, True], [True, True, False]])
    out = write(pages, tables, positions, valid, jnp.ones((3, 3, 3)))
    assert np.argwhere(np.asarray(out)[..., 0]).tolist() == [[2, 3], [3, 3]]
    # With scales: four rows of values, then 16 bytes of scales in six rows.
    scaled = jnp.zeros((5, 10, 3), jnp.uint8)
    values = jnp.broadcast_to(jnp.arange(1, 8, dtype=jnp.uint8), (3, 3, 7))
    got = np.asarray(write_scaled(scaled, tables, positions, valid, values, PAGE))
    for page in range(5):
        keys, scales = got[page, :4], got[page, 4:].reshape(-1)
        written = page in (2, 3)  # the last slot
        np.testing.assert_array_equal(keys[3], [1, 2, 3] if written else 0)
        np.testing.assert_array_equal(scales[12:16], [4, 5, 6, 7] if written else 0)
        assert not keys[:3].any()
        assert not scales[:12].any()
        assert not scales[16:].any()
