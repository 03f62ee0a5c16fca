"""Caches in float8: their bytes, and that a text's logits do not depend on how it is cached."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import dsv3_jax
from dsv3_jax import presets
from dsv3_jax.accounting import cache_bytes_per_token
from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import abstract_model
from dsv3_jax.kv_cache import CacheSpec, LatentKVCache, PagePool
from dsv3_jax.layers.indexer import Indexer, hadamard
from dsv3_jax.layers.paged_cache import Form, LayerCacheSpec
from dsv3_jax.layers.rope import rotation_at
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.roofline import cached_token_bytes
from dsv3_jax.plan.target import Target
from dsv3_jax.quantization import CacheDtype
from pallas_kernels import dequantize_latent, quantize_latent
from pallas_kernels.sparse_index import scaled_pages
from sharding import make_layout
from tests.support.checkpoints import (
    random_tensors,
    sparse_config,
    tiny_config,
    write_checkpoint,
)
from tests.support.oracle import relative_error
from tests.support.running import extend, forward

V3, V32 = presets.DEEPSEEK_V3, presets.get("deepseek-v3.2")
SMALL = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
CONFIGS = {
    "mla": tiny_config(kv_lora_rank=128, **SMALL),
    "sparse": sparse_config(kv_lora_rank=128, **SMALL),
}
LENGTH, BATCH = 48, 2
TOKENS = np.random.default_rng(3).integers(0, 160, (BATCH, LENGTH))


def token_bytes(layer: LayerCacheSpec) -> int:
    return sum(array.page_bytes(64) // 64 for array in layer.values())


@pytest.mark.parametrize(
    ("config", "cache_dtype", "expected"),
    [
        (V3, None, 1152),
        (V3, "fp8", 656),
        (V32, None, 1152 + 256),
        (V32, "fp8_index", 1152 + 132),
        (V32, "fp8", 656 + 132),
    ],
)
def test_bytes_of_a_token(config, cache_dtype, expected):
    """The spec, the planner and the accounting agree."""
    spec = CacheSpec.of_config(config, jnp.bfloat16, cache_dtype=cache_dtype)
    assert {token_bytes(layer) for layer in spec.layers} == {expected}
    deployment = Deployment(
        config, Target.parse("h200x8"), "single", 1, 4096, cache_dtype=cache_dtype
    )
    assert cached_token_bytes(deployment) == config.num_hidden_layers * expected
    if cache_dtype != "fp8_index":
        dtype = "bfloat16" if cache_dtype is None else "fp8"
        assert cache_bytes_per_token(config, dtype) == config.num_hidden_layers * expected


@pytest.mark.parametrize(
    ("cache_dtype", "latent", "key"),
    [(None, 1280, 256), ("fp8_index", 1280, 144), ("fp8", 768, 144)],
)
def test_bytes_of_a_token_on_a_tpu(cache_dtype, latent, key):
    """Latents are padded for the kernel, and pages of 66 rows of keys and scales to 72. Planner,
    arrays, and an engine that sizes its cache agree; test_tpu_compile_sparse.py asks the compiler.
    """
    spec = CacheSpec.of_config(V32, jnp.bfloat16, cache_dtype=cache_dtype)
    expected = V32.num_hidden_layers * (latent + key)
    assert spec.page_bytes(64, "tpu") == 64 * expected
    pool = PagePool.empty(spec, 1, platform="tpu")
    assert sum(x.nbytes for x in jax.tree.leaves(pool)) == 64 * expected
    pool.check_spec(spec)
    deployment = Deployment(
        V32, Target.parse("tpu:v5p:2x2x2"), "tpu_pod", 8, 4096, cache_dtype=cache_dtype
    )
    assert cached_token_bytes(deployment) == expected


def test_a_model_caches_what_its_config_says():
    cases: tuple[tuple[str, CacheDtype], ...] = (
        *(("mla", "fp8"), ("sparse", "fp8")),
        ("sparse", "fp8_index"),
    )
    for name, cache_dtype in cases:
        config = ModelConfig.from_hf(CONFIGS[name])
        model = abstract_model(config)
        model.use_cache_dtype(cache_dtype)
        assert model.cache_spec() == CacheSpec.of_config(
            config, jnp.float32, cache_dtype=cache_dtype
        )


@pytest.mark.parametrize(
    ("config", "cache_dtype", "message"),
    [
        (CONFIGS["mla"], "fp8_index", "expected a model with indexers, got deepseek_v3"),
        (tiny_config(), "fp8", "expected a latent of a multiple of 128 columns, got 32"),
        (
            sparse_config(kv_lora_rank=128, index_head_dim=24),
            "fp8",
            "index_head_dim: expected a power of two",
        ),
    ],
)
def test_refusals(config, cache_dtype, message):
    model = abstract_model(ModelConfig.from_hf(config))
    with pytest.raises(ValueError, match=message):
        model.use_cache_dtype(cache_dtype)


def test_float8_latents_have_no_attention_variants():
    model = abstract_model(ModelConfig.from_hf(CONFIGS["mla"]))
    model.use_attn_impl("CC")
    with pytest.raises(ValueError, match="cache_dtype: expected attn_impl None with it, got CC"):
        model.use_cache_dtype("fp8")
    model.use_attn_impl(None)
    model.use_cache_dtype("fp8")
    with pytest.raises(ValueError, match="attn_impl: expected None with cache_dtype fp8, got CC"):
        model.use_attn_impl("CC")


def test_a_latent_of_another_width_comes_back():
    rng = np.random.default_rng(0)
    latent, rope = (jnp.asarray(rng.normal(size=(3, n)), jnp.float32) for n in (256, 24))
    stored = quantize_latent(latent, rope)
    assert stored.shape == (3, 256 + 2 * 4 + 2 * 24)
    wider = jnp.pad(stored, ((0, 0), (0, 5)), constant_values=255)
    got = dequantize_latent(wider, columns=(256, 24))
    assert relative_error(np.asarray(got[0]), np.asarray(latent)) < 0.04
    np.testing.assert_array_equal(got[1], rope.astype(jnp.bfloat16).astype(jnp.float32))


def test_keys_are_quantized_as_published():
    """A Hadamard rotation, then one scale per key and values rounded to the nearest float8. On a
    page, the values of all tokens come first, then their scales: 132 bytes per token in V3.2."""
    config = ModelConfig.from_hf(CONFIGS["sparse"])
    indexer = Indexer(config, rngs=nnx.Rngs(0), dtype=jnp.float32, quantization=None)
    x = jax.random.normal(jax.random.key(0), (2, 8, config.hidden_size))
    rotation = rotation_at(config, jnp.broadcast_to(jnp.arange(8), (2, 8)))
    exact = np.asarray(indexer.entries(x, rotation)["index_key"], np.float64)
    indexer.use_float8_keys()
    (entries,) = indexer.entries(x, rotation).values()
    D, pages = exact.shape[-1], scaled_pages.pages_of(entries)
    # Keys of 16 columns: the scales of the eight tokens of a page take two rows.
    np.testing.assert_array_equal(pages[:, :8], entries[..., :D])
    np.testing.assert_array_equal(pages[:, 8:], entries[..., D:].reshape(2, 2, D))
    keys, scales = map(np.asarray, scaled_pages.split(pages, D, 8))
    rotated = exact @ (hadamard(D) / np.sqrt(D))
    scale = np.abs(rotated).max(axis=-1, keepdims=True) / 448
    np.testing.assert_allclose(scales[..., None], scale, rtol=1e-6)
    nearest = (rotated / scale).astype(ml_dtypes.float8_e4m3fn)
    assert np.mean(keys == nearest) > 0.99  # others lie between two values
    back = keys.astype(np.float64) * scales[..., None]
    assert relative_error(back @ hadamard(D).T / np.sqrt(D), exact) < 0.04
    pool = PagePool.empty(CacheSpec.of_config(V32, "bfloat16", cache_dtype="fp8_index"), 2)
    assert pool.layers[0]["index_key"].shape == (2, 66, 128)
    assert pool.layers[0]["index_key"][0].nbytes == 64 * 132


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cache_dtype", "parts"),
    [("mla", "fp8", 1), ("sparse", "fp8", 1), ("sparse", "fp8", 2)],
)
def test_chunks_equal_the_whole(tmp_path, name, cache_dtype, parts):
    """In both forms, also where two devices share the tokens of a sequence."""
    write_checkpoint(tmp_path, CONFIGS[name], random_tensors(CONFIGS[name]))
    layout = make_layout("context_parallel", devices=jax.devices()[:parts]) if parts > 1 else None
    whole = np.asarray(forward(dsv3_jax.load(tmp_path, cache_dtype=cache_dtype)[0], TOKENS)[0])
    exact = np.asarray(forward(dsv3_jax.load(tmp_path)[0], TOKENS)[0])
    assert 1e-3 < relative_error(whole, exact) < 0.2
    model, _ = dsv3_jax.load(tmp_path, cache_dtype=cache_dtype, layout=layout)
    forms: dict[Form, int] = {"expanded": 24, "absorbed": 3}
    for form, chunk in forms.items():
        cache = LatentKVCache.init(
            model.cache_spec(), BATCH, LENGTH, page_size=8 // parts, layout=layout
        )
        for begin in range(0, LENGTH, chunk):
            new = TOKENS[:, begin : begin + chunk]
            logits, cache = extend(model, new, [chunk] * BATCH, cache, form)
            want = whole[:, begin : begin + chunk]
            # A latent at the edge between two float8 values may be rounded otherwise.
            errors = [relative_error(np.asarray(logits[b]), want[b]) for b in range(BATCH)]
            assert np.median(errors) < 1e-4
            assert max(errors) < 0.05
