"""A whole model on a Hopper GPU, with and without kernels, and on several GPUs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.decode import models
from dsv3_jax import presets
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.layers.on_mesh import stored_shardings
from dsv3_jax.layers.paged_cache import Form
from dsv3_jax.offline.generator import Generator
from pallas_kernels import dispatch
from sharding import make_layout
from tests.pallas_kernels.machine import on_gpu, on_gpus
from tests.support.running import extend

BATCH, PROMPT, STEPS, CHUNK = 4, 300, 12, 256
CONFIG = dataclasses.replace(
    presets.MOONLIGHT_16B,
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=2048,
    moe_intermediate_size=512,
    num_hidden_layers=4,
)
# Sequences of more than 128 tokens are attended to sparsely.
SPARSE = dataclasses.replace(
    presets.DEEPSEEK_V3_2,
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=2048,
    moe_intermediate_size=512,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    n_routed_experts=32,
    num_attention_heads=16,
    q_lora_rank=512,
    index_topk=128,
    quantization=None,
)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (BATCH, PROMPT + STEPS))


def model_of(dtype, config=CONFIG):
    """A model with the same weights in either dtype: numbers that bfloat16 can represent."""
    model = models.random_model(models.shapes(config, "bf16", "bfloat16", mtp=False))
    graph = nnx.split(models.shapes(config, "bf16", dtype, mtp=False))[0]
    weights = nnx.split(model)[1]
    wanted = nnx.split(models.shapes(config, "bf16", dtype, mtp=False))[1]
    return nnx.merge(graph, jax.tree.map(lambda x, like: x.astype(like.dtype), weights, wanted))


def with_layout(model, layout):
    """The same model on the devices of ``layout``."""
    model = nnx.clone(model)
    model.lay_out(layout)
    shardings = stored_shardings(model, layout)
    for path, parameter in nnx.to_flat_state(nnx.state(model)):
        parameter.set_value(jax.device_put(parameter.get_value(), shardings[path]))
    return model


@pytest.fixture
def without_kernels(monkeypatch):
    """Runs a function without kernels, as for arrays that XLA may partition."""

    def run(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "_auto_devices", lambda: 2)
            jax.clear_caches()  # kernels may have been traced into functions of the same arguments
            results = function(*args)
        jax.clear_caches()
        return results

    return run


def test_kernels_can_be_left_out(without_kernels):
    """The fixture names a function of dispatch, which only a GPU would otherwise miss."""
    backends = {"mosaic_gpu": lambda: "kernel", "reference": lambda: "reference"}
    choose = functools.partial(dispatch.dispatch, "op", backends, None)
    assert without_kernels(choose) == "reference"


def logits(model):
    """[BATCH, PROMPT + STEPS, V]: a prompt in expanded chunks, then token by token, absorbed."""
    cache = LatentKVCache.init(model.cache_spec(), BATCH, TOKENS.shape[1], layout=model.layout)
    results, start = [], 0
    pieces = [CHUNK, PROMPT - CHUNK, *[1] * STEPS]
    for tokens in pieces:
        form: Form = "absorbed" if tokens == 1 else "expanded"
        counts = np.full(BATCH, tokens)
        out, cache = extend(model, TOKENS[:, start : start + tokens], counts, cache, form)
        results.append(np.asarray(out, np.float32))
        start += tokens
    return np.concatenate(results, axis=1)


@on_gpu
def test_errors_of_bfloat16_are_no_larger_with_kernels(without_kernels):
    with jax.default_matmul_precision("highest"):
        exact = without_kernels(logits, model_of(jnp.float32))
    plain, ours = without_kernels(logits, model_of(jnp.bfloat16)), logits(model_of(jnp.bfloat16))
    assert_no_larger(ours, plain, exact)


@on_gpu
@pytest.mark.parametrize("cache_dtype", [None, "fp8"])
def test_errors_of_sparse_attention_are_no_larger_with_kernels(without_kernels, cache_dtype):
    def model(dtype):
        model = model_of(dtype, SPARSE)
        if cache_dtype is not None:
            model.use_cache_dtype(cache_dtype)
        return model

    with jax.default_matmul_precision("highest"):
        exact = without_kernels(logits, model(jnp.float32))
    plain, ours = without_kernels(logits, model(jnp.bfloat16)), logits(model(jnp.bfloat16))
    assert_no_larger(ours, plain, exact)


def assert_no_larger(ours, plain, exact):
    """Asserts that our error against ``exact`` is at most 1.1 times that of ``plain``."""

    def error(of, positions):
        differences = (of - exact)[:, positions]
        return np.sqrt(np.mean(differences**2) / np.mean(exact[:, positions] ** 2))

    for name, positions in (("prefill", slice(PROMPT)), ("decode", slice(PROMPT, None))):
        plain_error, our_error = error(plain, positions), error(ours, positions)
        print(f"{name}: {our_error:.4f} with kernels, {plain_error:.4f} without")
        assert 0 < plain_error < 0.5
        # Rounding can change the choice of experts, which has a large effect and is random.
        assert our_error <= 1.1 * plain_error


@on_gpu
def test_tokens_of_float32_are_the_same_with_kernels(without_kernels):
    assert generated(model_of(jnp.float32)) == without_kernels(generated, model_of(jnp.float32))


def generated(model):
    generator = Generator(model, None, max_len=128)
    settings = {"max_new_tokens": 64, "ignore_eos": True}
    prompts = [row[:40].tolist() for row in TOKENS]
    return [c.tokens for c in generator.generate(prompts, **settings)]


LAYOUTS = {
    "all_gather": ("dp_attention_ep", {}),
    "all_to_all": ("dp_attention_ep", {"exchange": "all_to_all"}),
    "ragged_all_to_all": ("dp_attention_ep", {"exchange": "ragged_all_to_all"}),
    "float8_dispatch": ("dp_attention_ep", {"exchange": "all_to_all", "float8_dispatch": True}),
    "tensor_parallel": ("tensor_parallel", {}),
    "tp_attention_ep": ("tp_attention_ep", {}),
}


@pytest.fixture(scope="module")
def one_device_results():
    """Compares float32 tokens, float32 logits at full precision, and bfloat16 logits."""
    tokens = generated(model_of(jnp.float32))
    with jax.default_matmul_precision("highest"):
        exact = logits(model_of(jnp.float32))
    return tokens, exact, logits(model_of(jnp.bfloat16))


@on_gpus
@pytest.mark.parametrize("name", LAYOUTS)
def test_several_devices(name, one_device_results):
    tokens, exact, one_device = one_device_results
    preset, settings = LAYOUTS[name]
    layout = make_layout(preset, **settings)
    if layout.float8_dispatch:  # rounds tokens on one device too
        single = make_layout("single", float8_dispatch=True)
        one_device = logits(with_layout(model_of(jnp.bfloat16), single))
    else:
        assert generated(with_layout(model_of(jnp.float32), layout)) == tokens
    assert_no_larger(logits(with_layout(model_of(jnp.bfloat16), layout)), one_device, exact)


@on_gpu
def test_requests_do_not_depend_on_the_sampling_of_others():
    """Programs of other sampling modes choose the same tokens. XLA may order the sums in their
    log-probabilities differently.
    """
    generator = Generator(model_of("bfloat16"), None, 64, batch_sizes=(2,))

    def generate(temperature, top_p=1.0):
        return generator.generate(
            TOKENS[:2, :20].tolist(),
            max_new_tokens=24,
            ignore_eos=True,
            temperature=temperature,
            top_p=top_p,
            seed=[0, 1],
        )

    greedy, unfiltered = generate(0.0), generate([0.0, 0.7])
    filtered, sampled = generate([0.0, 0.7], [1.0, 0.5]), generate([0.7, 0.7], [0.5, 1.0])
    for pair in ((greedy[0], unfiltered[0]), (greedy[0], filtered[0]), (unfiltered[1], sampled[1])):
        assert pair[0].tokens == pair[1].tokens
        np.testing.assert_allclose(pair[0].logprobs, pair[1].logprobs, rtol=1e-6)


@on_gpu
@pytest.mark.parametrize("backend", ["separate", "mosaic_gpu"])
def test_the_newest_position_of_the_mtp_layer(backend):
    """It equals that of the whole extension, and so does the cache."""
    config = dataclasses.replace(CONFIG, num_nextn_predict_layers=1)
    model = models.random_model(models.shapes(config, "bf16", "bfloat16", mtp=True))
    model.use_feed_forward(backend)
    graph, state = nnx.split(model)
    cache = LatentKVCache.init(model.cache_spec(mtp=True), 2, 256, layout=None)
    hidden = jax.random.normal(jax.random.key(2), (2, 3, config.hidden_size), jnp.bfloat16)
    starts, counts = jnp.array([5, 70], jnp.int32), jnp.array([3, 2], jnp.int32)

    @functools.partial(jax.jit, static_argnames="newest_only")
    def run(state, cache, starts, counts, newest_only):
        return nnx.merge(graph, state).extend_mtp(
            hidden,
            jnp.asarray(TOKENS[:2, :3]),
            starts,
            counts,
            cache,
            "absorbed",
            newest_only=newest_only,
        )

    whole, whole_cache = run(state, cache, starts, counts, newest_only=False)
    newest, newest_cache = run(state, cache, starts, counts, newest_only=True)
    for sequence, last in enumerate([2, 1]):
        got, want = (
            np.asarray(x, np.float32)
            for x in (newest.post_norm[sequence, 0], whole.post_norm[sequence, last])
        )
        assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)
    for got, want in zip(*map(jax.tree.leaves, (newest_cache.pool, whole_cache.pool)), strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=0.02, atol=0.02
        )
