"""The five published attention variants have equal logits: those of a pass without a cache.

Float32, to 1e-5. Sequences have different lengths, and each spans several pages and several context
blocks.
"""

import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dsv3_jax
from dsv3_jax import presets
from dsv3_jax.accounting import cache_bytes_per_token, count_parameters, flops_per_token
from dsv3_jax.attn_impl import ATTN_IMPLS, check_attn_impl, decode_attention
from dsv3_jax.initialization import abstract_model
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.layers import cached_attention
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.offline.generator import Generator
from dsv3_jax.overrides import attention_variants
from dsv3_jax.overrides.attention_variants import materialize
from sharding import make_layout
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.support.covering import slow_except
from tests.support.oracle import relative_error
from tests.support.running import extend, forward

BOUND = 1e-5
PAGE, ROOM = 8, 48
PROMPTS, LENGTHS = np.array([33, 12, 1]), np.array([41, 18, 7])
BATCH = len(LENGTHS)
TOKENS = np.random.default_rng(3).integers(0, 160, (BATCH, LENGTHS.max()))
V3, LITE = presets.DEEPSEEK_V3, presets.DEEPSEEK_V2_LITE

every_impl = pytest.mark.parametrize("attn_impl", ATTN_IMPLS)


@pytest.fixture(scope="module", autouse=True)
def _short_blocks():
    """Sets context blocks to two pages per sequence, so that 41 tokens span three blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cached_attention, "_CONTEXT_TOKENS", 2 * PAGE * BATCH)
        patch.setattr(attention_variants, "_STEP_TOKENS", 2 * PAGE)
        yield


def load(directory, **overrides) -> DeepSeekV3:
    config = tiny_config(**overrides)
    write_checkpoint(directory, config, random_tensors(config))
    return dsv3_jax.load(directory, dtype=jnp.float32)[0]


def using(model: DeepSeekV3, attn_impl) -> DeepSeekV3:
    model = nnx.merge(*nnx.split(model))
    model.use_attn_impl(attn_impl)
    return model


def empty(model: DeepSeekV3) -> LatentKVCache:
    return LatentKVCache.init(model.cache_spec(), BATCH, ROOM, page_size=PAGE)


def check_chunks(model, whole, targets, cache, chunk, form) -> LatentKVCache:
    """Extends each sequence to its target by `chunk` tokens and compares with the whole pass."""
    while (counts := np.clip(targets - np.asarray(cache.lengths), 0, chunk)).any():
        starts = np.asarray(cache.lengths)
        window = np.zeros((BATCH, chunk), np.int64)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            window[b, :count] = TOKENS[b, start : start + count]
        logits, cache = extend(model, window, counts, cache, form)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if count:
                got, want = logits[b, :count], whole[b, start : start + count]
                assert relative_error(got, want) < BOUND
    return cache


# ---- equal results-------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[40], ids=["q_lora"])
def layer(request, tmp_path_factory) -> DeepSeekV3:
    """Variants differ only in attention, and one dense layer compiles quickly."""
    shape = {"num_hidden_layers": 1, "num_nextn_predict_layers": 0, "q_lora_rank": request.param}
    return load(tmp_path_factory.mktemp("layer"), **shape)


@pytest.fixture(scope="module")
def whole(layer) -> np.ndarray:
    return np.asarray(forward(layer, TOKENS)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attn_impl", "layer"),
    slow_except(
        [
            *((name, 40) for name in ATTN_IMPLS),
            *((name, None) for name in ATTN_IMPLS),
        ],
        quick=(0,),
    ),
    indirect=["layer"],
)
def test_prefill_and_decode_equal_the_whole(attn_impl, layer, whole):
    variant = using(layer, attn_impl)
    cache = empty(variant)
    # With a compressed cache every variant prefills like the default: one program.
    prefilled = variant if attn_impl == "CD" else layer
    cache = check_chunks(prefilled, whole, PROMPTS, cache, 11, "expanded")
    # With precomputed weights, as in a decode loop, and without.
    decoding = variant if layer.config.q_lora_rank is None else variant.precompute_for_decode()
    cache = check_chunks(decoding, whole, LENGTHS, cache, 2, "absorbed")
    assert cache.lengths.tolist() == LENGTHS.tolist()


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> DeepSeekV3:
    """A dense layer and an MTP layer, which has experts."""
    return load(tmp_path_factory.mktemp("small"), num_hidden_layers=1)


def generated(model: DeepSeekV3, **settings) -> list[list[int]]:
    """Returns greedy tokens."""
    generator = Generator(model, None, 40, batch_sizes=(2,), prefill_chunk=16)
    prompts = [TOKENS[0, :20].tolist(), TOKENS[1, :7].tolist()]
    out = generator.generate(prompts, max_new_tokens=12, ignore_eos=True, **settings)
    return [completion.tokens for completion in out]


@pytest.fixture(scope="module")
def tokens(small) -> list[list[int]]:
    return generated(small)


MTP = {"draft": "mtp", "draft_depth": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attn_impl", "settings"),
    # Drafts with variants for which the MTP layer has its own kind of cache or multiplied weights.
    [("CD", MTP), ("CC", {}), ("A_CC", {}), ("A_CC_ME", {}), ("AM_CC_ME", MTP)],
)
def test_greedy_tokens_are_the_same(attn_impl, settings, small, tokens):
    assert generated(using(small, attn_impl), **settings) == tokens


def test_none_is_the_model_as_it_was(small):
    before = nnx.split(small)[0]
    assert nnx.split(using(using(small, "CD"), None))[0] == before


def test_on_a_mesh(layer):
    """A mesh accepts the default only: see test_layouts.py."""
    layout = make_layout("dp_attention_ep", devices=jax.devices()[:2])
    for attn_impl in ATTN_IMPLS:
        laid = using(layer, None)
        refused = attn_impl != "A_CC_ME"
        expected = pytest.raises(ValueError, match=f"expected A_CC_ME for .* got {attn_impl}")
        with expected if refused else contextlib.nullcontext():
            using(layer, attn_impl).lay_out(layout)
        laid.lay_out(layout)
        with expected if refused else contextlib.nullcontext():
            laid.use_attn_impl(attn_impl)
        assert laid.attn_impl == (None if refused else attn_impl)


# ---- what is refused -----------------------------------------------------------------------------


def test_another_name_is_refused():
    expected = "attn_impl: expected one of CD, CC, A_CC, A_CC_ME, AM_CC_ME, got 'absorbed'"
    for refusing in (
        lambda: check_attn_impl("absorbed"),
        lambda: cache_bytes_per_token(V3, attn_impl="absorbed"),  # pyright: ignore
        lambda: decode_attention(V3, 1, "absorbed"),  # pyright: ignore
    ):
        with pytest.raises(ValueError, match=expected):
            refusing()


@pytest.mark.parametrize(
    ("attn_impl", "made_for", "columns"),
    [
        ("CD", None, "keys_values of 144 or 256 columns, got latent of 40"),
        ("CC", "CD", "latent of 40 or 128 columns, got keys_values of 144"),
    ],
)
def test_a_cache_made_for_another_is_refused(attn_impl, made_for, columns, layer):
    cache = empty(using(layer, made_for))
    with pytest.raises(ValueError, match=columns):
        extend(using(layer, attn_impl), TOKENS[:, :1], np.ones(BATCH), cache, "absorbed")


def test_costs_that_have_no_formula_are_refused():
    with pytest.raises(ValueError, match="dtype: expected bfloat16 for attn_impl CD, got fp8"):
        cache_bytes_per_token(V3, "fp8", attn_impl="CD")
    with pytest.raises(ValueError, match="context: expected at least 1 token, got 0"):
        decode_attention(V3, 0, "CC")
    with pytest.raises(ValueError, match="without an indexer, got deepseek_v32"):
        decode_attention(presets.DEEPSEEK_V3_2, 1, "CC")


# ---- what they cost ------------------------------------------------------------------------------


@every_impl
def test_cache_bytes_are_those_of_the_pages(attn_impl):
    model = abstract_model(V3, dtype="bfloat16")
    model.use_attn_impl(attn_impl)
    init = functools.partial(LatentKVCache.init, model.cache_spec(), 1, 64, platform="cpu")
    arrays = jax.eval_shape(lambda: jax.tree.leaves(init().pool))
    cached = 2 * sum(math.prod(array.shape) for array in arrays)
    assert cached == 64 * cache_bytes_per_token(V3, attn_impl=attn_impl)
    assert cache_bytes_per_token(V3, attn_impl="CD") == 61 * 2 * 128 * (192 + 128)


def test_costs_of_v3():
    """Calculated by hand, in multiply-adds per layer; its projections have 187,105,280 elements."""
    S, projections = 4096, 187_107_328 - 1536 - 512
    macs = {
        "CD": projections + S * 128 * 320,
        "CC": projections + (S - 1) * 128 * 256 * 512 + S * 128 * 320,
        "A_CC": projections + S * 128 * 1088,
        "A_CC_ME": projections + S * 128 * 1088,
        "AM_CC_ME": 7168 * (1536 + 576) + 128 * (1536 * 576 + 512 * 7168) + S * 128 * 1088,
    }
    assert {name: decode_attention(V3, S, name).flops for name in macs} == {
        name: 2 * 61 * number for name, number in macs.items()
    }
    unpacked = {name: decode_attention(V3, S, name).unpacked_bytes for name in macs}
    of_heads = {"CC": 128 * 320, "A_CC": 128 * 576}
    assert unpacked == {name: 2 * 61 * S * of_heads.get(name, 0) for name in macs}


def test_figures_of_the_documentation():
    """Figures in docs/generation.md and notebook 02, in units of 10^9."""
    cd, cc, a_cc, a_cc_me, am_cc_me = (decode_attention(V3, 4096, name) for name in ATTN_IMPLS)
    assert [round(c.cache_bytes / 1e9, 2) for c in (cd, a_cc_me)] == [20.47, 0.29]
    assert [round(c.flops / 1e9) for c in (cc, a_cc_me)] == [8425, 92]
    assert [round(c.weight_bytes / 1e9, 1) for c in (am_cc_me, a_cc_me)] == [73.0, 22.8]
    assert round(a_cc.unpacked_bytes / 1e9, 1) == 36.8
    assert round(cc.flops / a_cc_me.flops) == 91
    sizes = [cache_bytes_per_token(V3, attn_impl=name) * 128 * 1024 / 1e9 for name in ("CD", "CC")]
    assert [round(size, 1) for size in sizes] == [655.0, 9.2]


@pytest.mark.parametrize("config", [V3, LITE], ids=["q_lora", "no_q_lora"])
def test_costs_agree_with_the_rest_of_the_accounting(config):
    L, S = config.num_hidden_layers, 1000
    norms = L * (config.kv_lora_rank + (config.q_lora_rank or 0))
    projections = count_parameters(config).attention - norms
    cost = decode_attention(config, S, "A_CC_ME")
    attention = flops_per_token(config, S, "decode").attention
    assert cost.flops == 2 * projections + attention
    assert cost.weight_bytes == 2 * projections
    assert cost.cache_bytes == S * cache_bytes_per_token(config)
    products = abstract_products(config)
    added = L * sum(math.prod(x.shape) for x in products)
    taken = config.num_attention_heads * (
        config.qk_head_dim * (config.q_lora_rank or config.hidden_size)
        + (config.qk_nope_head_dim + config.v_head_dim) * config.kv_lora_rank
        + config.v_head_dim * config.hidden_size
    )
    grown = decode_attention(config, S, "AM_CC_ME").weight_bytes
    assert grown == 2 * (projections - L * taken + added)


def abstract_products(config):
    """Shapes of the multiplied matrices of AM_CC_ME."""
    shape = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    one = dataclasses.replace(config, **shape)
    graph, state = nnx.split(abstract_model(one).layers[0].self_attn)
    return jax.eval_shape(lambda state: materialize(nnx.merge(graph, state), jnp.bfloat16), state)
