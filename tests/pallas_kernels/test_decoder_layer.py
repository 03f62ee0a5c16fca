"""feed_forward: the reference against the model's layers, the kernel in Pallas' interpreter."""

import collections
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.config import ModelConfig
from dsv3_jax.kv_cache import LatentKVCache, TokenBatch
from dsv3_jax.layers.block import DecoderLayer
from dsv3_jax.layers.paged_cache import LayerCache
from dsv3_jax.layers.rope import rotation_at
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.overrides.few_tokens import FewTokens
from dsv3_jax.overrides.few_tokens import arguments as arguments_of
from dsv3_jax.quantization import IntegerQuantization
from pallas_kernels import feed_forward
from pallas_kernels.decoder_layer import mosaic_gpu, reference
from pallas_kernels.decoder_layer.api import BACKENDS
from pallas_kernels.decoder_layer.mosaic_gpu import FeedForward
from pallas_kernels.decoder_layer.plan import Plan
from pallas_kernels.decoder_layer.registers import MOST_SPLIT_TOKENS
from tests.pallas_kernels.decoder_layer_cases import (
    BFLOAT16,
    FLOAT8,
    FLOAT32,
    INT4,
    INT8,
    Layer,
    expected,
    rule,
    stored_dtype,
)
from tests.pallas_kernels.layer_halves import chain, exact, plain
from tests.pallas_kernels.machine import INTERPRET, ON_GPU, kernel_runs, off_gpu
from tests.pallas_kernels.numerics import check, relative_error, tolerance
from tests.support.checkpoints import tiny_config

MOE = Layer(expert_ffn=128, experts=32, rule=rule(2), attention=128)
MOONLIGHT = Layer(1, 2048, 2816, 1408, 64, rule(6), BFLOAT16, BFLOAT16, 2048, 16, 512)
V3 = Layer(1, 7168, 2048, 2048, 256, rule(8, 8, 4), BFLOAT16, FLOAT8, 16384, 128, 512)


def plan_of(layer, ctas=132):
    return Plan.of(
        ctas=ctas, tokens=layer.tokens, width=layer.width, attention=layer.attention,
        heads=layer.heads, latent=layer.latent, sequences=len(layer.split), ffn=layer.ffn,
        expert_ffn=layer.expert_ffn, experts=layer.experts, rule=layer.rule, eps=1e-6,
        dtype=jnp.dtype(layer.dtype), weight_dtype=jnp.dtype(stored_dtype(layer.weights)),
        interpret=None,
    )  # fmt: skip


def cta_of(plan, number):
    cta = object.__new__(FeedForward)
    cta.plan, cta.cta = plan, number
    return cta


# ---- the reference -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "moe"])
def test_reference_is_the_models_layer(dense):
    config = ModelConfig.from_hf(tiny_config())
    layer = DecoderLayer(
        config, dense=dense, rngs=nnx.Rngs(0), dtype=jnp.float32, quantization=None
    )
    layer.post_attention_layernorm.weight.set_value(
        1 + jax.random.normal(jax.random.key(1), (config.hidden_size,)) * 0.1
    )
    h = jax.random.normal(jax.random.key(0), (1, 5, config.hidden_size))
    want, stats = layer.feed_forward(h, jnp.zeros_like(h))
    arrays, options = arguments_of(layer)
    got, chosen = feed_forward(h[0], **arrays, **options)
    check(got, want[0], tolerance(FLOAT32))
    assert (chosen is None) == dense
    if chosen is not None and stats is not None:
        np.testing.assert_array_equal(chosen.experts, stats.experts)
        np.testing.assert_allclose(chosen.scores, stats.scores, rtol=1e-6)


@pytest.mark.slow
def test_the_benchmark_compares_equal_layers():
    """Its plain path is the model's, its float32 reference close to that in bfloat16."""
    config = ModelConfig.from_hf(tiny_config())
    layer = DecoderLayer(
        config, dense=False, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, quantization=None
    )
    graph, state = nnx.split(layer)
    h = jax.random.normal(jax.random.key(0), (3, config.hidden_size), jnp.bfloat16)
    want, _ = layer.feed_forward(h[None], jnp.zeros_like(h[None]))
    states = [state, state]
    np.testing.assert_array_equal(chain(plain(graph), 1)(h, None, states[:1]), want[0])
    got, wanted = (chain(half(graph), 2)(h, None, states) for half in (plain, exact))
    check(got, wanted, 4 * tolerance(BFLOAT16))


@pytest.mark.slow
def test_reference_in_float64():
    layer = dataclasses.replace(MOE, tokens=3, ffn=256, weights=FLOAT8, attention=256)
    arguments = layer.arguments()
    got, chosen = reference.feed_forward(**arguments, **layer.options)
    assert chosen is not None
    check(got, expected(arguments, chosen.experts, chosen.weights), tolerance(FLOAT32))


PARTS = Layer(4, attention=128, heads=2, latent=256, split=(3, 1))


@pytest.mark.parametrize("layer", [MOE, Layer(3, 256, 384, weights=FLOAT8, attention=128), PARTS])
def test_shapes_are_those_of_the_arguments(layer):
    """The tests of compilation and refusals use the shapes alone."""
    shapes, arguments = layer.shapes(), jax.eval_shape(layer.arguments)
    assert jax.tree.structure(shapes) == jax.tree.structure(arguments)
    assert jax.tree.leaves(shapes) == jax.tree.leaves(arguments)


def test_the_kernel_is_not_the_default():
    assert next(iter(BACKENDS)) == "reference"


# ---- the plan ------------------------------------------------------------------------------------


SHARED = [
    pytest.param(MOONLIGHT, id="moonlight"),
    pytest.param(dataclasses.replace(MOONLIGHT, weights=INT4), id="moonlight int4"),
    pytest.param(V3, id="v3"),
    pytest.param(dataclasses.replace(MOONLIGHT, heads=0, latent=0), id="moonlight o_proj"),
]


@pytest.mark.parametrize("ctas", [132, 7])
@pytest.mark.parametrize("layer", SHARED)
def test_ctas_share_every_unit_once(layer, ctas):
    """Every matrix' groups of eight output features, or 16 in w_uv, in every phase."""
    plan = plan_of(layer, ctas)
    for phase in plan.phases:
        size = phase.rows
        halves_of_a_matrix = phase.name in ("w_uv", "o_proj") or phase.name.endswith("down")
        assert size == (16 if halves_of_a_matrix and not phase.operand.is_split else 8)

        def locate(number, i, phase=phase):
            cta = cta_of(plan, number)
            return cta.count(phase), *cta.locate(phase, i)

        most = phase.matrices * -(-phase.units // ctas) + 1
        over_units = jax.vmap(locate, (None, 0))
        every = jax.jit(jax.vmap(over_units, (0, None)))(jnp.arange(ctas), jnp.arange(most))
        counts, matrices, rows = (np.asarray(each) for each in every)
        exists = np.arange(most) < counts
        assert counts.max() < most
        located = collections.Counter(zip(matrices[exists], rows[exists], strict=True))
        wanted = itertools.product(range(phase.matrices), range(0, size * phase.units, size))
        assert located == collections.Counter(wanted)
        if phase.name == "w_uv":  # A CTA has the latents of its units' heads.
            first = cta_of(plan, jnp.arange(ctas)).first_head()
            heads = matrices - np.asarray(first)[:, None]
            assert heads[exists].min() >= 0
            assert heads[exists].max() < plan.w_uv_heads


# Numbers of the routed and shared experts and of o_proj, and of the router and W_UV.
OF_MOONLIGHT = 8 * 3 * 2048 * 1408 + 2048 * 2048, 2048 * 64 + 2048 * 512
OF_V3 = 9 * 3 * 7168 * 2048 + 7168 * 16384, 7168 * 256 + 16384 * 512


@pytest.mark.parametrize(
    ("layer", "numbers", "size"),
    [
        (MOONLIGHT, OF_MOONLIGHT, 2),
        (V3, OF_V3, 1),
        (dataclasses.replace(MOONLIGHT, weights=INT8), OF_MOONLIGHT, 1),
        (dataclasses.replace(V3, weights=INT4), OF_V3, 0.5),
    ],
    ids=["moonlight", "v3", "moonlight int8", "v3 int4"],
)
def test_phases_read_every_weight_once(layer, numbers, size):
    """``size`` is the bytes of a weight of any matrix but the router and W_UV."""
    total = 0
    for phase in plan_of(layer).phases:
        operand = phase.operand
        assert operand.steps * operand.step == operand.columns
        total += phase.units * phase.matrices * 16 * operand.steps * operand.step_bytes
    assert total == numbers[0] * size + numbers[1] * 2


def test_shared_memory_of_the_plans():
    """More than 128 KiB of weights are in flight for one token, and 4 tokens of V3 still fit."""
    assert {plan_of(layer).stages.row_bytes for layer in (MOONLIGHT, V3)} == {1088}
    assert [plan_of(layer).stages.count for layer in (MOONLIGHT, V3)] == [11, 10]
    assert plan_of(dataclasses.replace(V3, tokens=MOST_SPLIT_TOKENS)).stages.count == 4


REFUSED = [
    ({"attention": 0}, "takes layers with o_proj, got none"),
    ({"tokens": 9}, "1 to 8 tokens, got 9"),
    ({"width": 192}, "hidden widths of a multiple of 128, got 192"),
    ({"experts": 36}, "multiple of 8 experts, 384 at most, got 36"),
    ({"experts": 32, "rule": rule(17)}, "16 experts per token at most, got 17"),
    ({"tokens": 8, "ffn": 18432}, "takes 3 ring stages of .* got room for 0"),
    ({"dtype": FLOAT32}, "takes bfloat16 activations and routers, got float32"),
    (
        {"attention": 128, "heads": 2, "latent": 128, "split": (2,)},
        "parts with a multiple of 256 columns, got 128",
    ),
    (
        {"weights": "float16"},
        "bfloat16, or of float8_e4m3fn, int8 or int4 with scales, got float16",
    ),
    ({"weights": FLOAT8, "tokens": 5}, "1 to 4 tokens for float8_e4m3fn matrices, got 5"),
]


@off_gpu
@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refusals(changes, message, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    layer = dataclasses.replace(MOE, **{"dtype": BFLOAT16, "weights": BFLOAT16} | changes)
    run = functools.partial(mosaic_gpu.feed_forward, **layer.options)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(lambda arguments: run(**arguments), layer.shapes())


@off_gpu
def test_it_needs_a_hopper_gpu():
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs"):
        feed_forward(**MOE.arguments(), **MOE.options, implementation="mosaic_gpu")


@pytest.mark.slow
def test_layers_that_the_kernel_does_not_take():
    """A layer that names only the kernel fails. One that names others too runs on the next."""
    config = ModelConfig.from_hf(tiny_config())
    layer = DecoderLayer(
        config,
        dense=False,
        rngs=nnx.Rngs(0),
        dtype=jnp.float32,
        quantization=IntegerQuantization(bits=4, group_size=64),
    )
    x = jax.random.normal(jax.random.key(0), (1, 2, config.hidden_size))
    rotation = rotation_at(config, jnp.arange(2)[None])
    pages = {"latent": jnp.zeros((1, 64, config.latent_dim))}
    cache = LayerCache(pages, jnp.zeros((1, 1), int), jnp.zeros((1,), int), jnp.ones((1, 2), bool))
    step: Any = layer, x, rotation, [cache], ["absorbed"]
    plain, _, _ = layer.forward_cached(*step[1:])
    with pytest.raises(NotImplementedError, match="int4 with blocks of 1x128, got Integer"):
        FewTokens("mosaic_gpu").forward_cached(*step)
    np.testing.assert_array_equal(
        FewTokens(("mosaic_gpu", "separate")).forward_cached(*step)[0], plain
    )


def test_attention_that_is_projected_already():
    """The reference adds it to the residual."""
    arguments = dataclasses.replace(MOE, attention=0).arguments()
    attended = jax.random.normal(jax.random.key(0), arguments["h"].shape)
    got, _ = feed_forward(**arguments | {"attended": attended}, **MOE.options)
    want, _ = feed_forward(**arguments | {"h": arguments["h"] + attended}, **MOE.options)
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_reference_merges_parts():
    layer = dataclasses.replace(PARTS, weights=FLOAT32)
    arguments = layer.arguments()
    got, _ = reference.feed_forward(**arguments, **layer.options)
    check(got, expected(arguments, None, None), tolerance(FLOAT32))


@pytest.mark.parametrize(
    "changes",
    [{"tokens": 3}, {"heads": 4, "attention": 256}, {"latent": 512}, {"dtype": BFLOAT16}],
    ids=str,
)
def test_parts_of_other_layers(changes, untyped):
    other = dataclasses.replace(PARTS, **changes)
    arguments = other.arguments() if "tokens" not in changes else PARTS.arguments()
    if "tokens" in changes:
        arguments["h"] = arguments["h"][:3]
    else:
        arguments["attended"] = PARTS.arguments()["attended"]
    with pytest.raises(ValueError, match=r"attended: expected .* parts of \d tokens"):
        feed_forward(**arguments, **PARTS.options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attended": jnp.ones((1, 64))}, r"attended: expected float32 of shape \(1, 128\)"),
        ({"w_uv": jnp.ones((2, 16, 128)), "attended": jnp.ones((1, 256))}, "w_uv: expected an o_"),
        ({"routed": None}, "expected shared alone, or router, routed and rule"),
        ({"norm": jnp.ones(64)}, r"norm: expected shape \(128,\), got \(64,\)"),
        ({"shared": Layer(width=64).arguments()["shared"]}, "shared: expected gate, up and down"),
    ],
)
def test_wrong_arguments(changes, message, untyped):
    with pytest.raises(ValueError, match=message):
        feed_forward(**MOE.arguments() | changes, **MOE.options)


# ---- the kernel ----------------------------------------------------------------------------------

# Layers, and how many CTAs the interpreter runs.
INTERPRETED = {
    "dense": (Layer(tokens=3, attention=128), 2),
    # Groups, and more CTAs than output units of 16 / 2 CTAs each.
    "groups": (
        dataclasses.replace(
            MOE,
            tokens=2,
            ffn=256,
            rule=rule(2, 4, 2),
            dtype=BFLOAT16,
            weights=BFLOAT16,
        ),
        2,
    ),
    # The router waits for the projection of attention's output.
    "attention's projection": (
        dataclasses.replace(MOE, tokens=2, attention=384, rule=rule(1)),
        2,
    ),
    "softmax, no shared experts": (
        dataclasses.replace(MOE, ffn=0, rule=rule(2, 4, 2, "group_limited_greedy")),
        3,
    ),
    # A warp's last lanes have no expert.
    "16 experts": (
        dataclasses.replace(MOE, tokens=3, experts=16, rule=rule(2, 4, 2), attention=128),
        3,
    ),
    "softmax, 40 experts": (
        dataclasses.replace(MOE, ffn=0, experts=40, rule=rule(3, 1, 1, "greedy"), tokens=2),
        2,
    ),
    # Batches of rows: those of the experts do not all fit at the same time.
    "float8": (
        dataclasses.replace(MOE, width=256, tokens=2, dtype=BFLOAT16, weights=FLOAT8, rule=rule(3)),
        2,
    ),
    "float8, W_UV": (
        Layer(4, 256, 256, dtype=BFLOAT16, weights=FLOAT8, attention=128, heads=2, latent=256),
        2,
    ),
    # Without a router: the reference rounds dequantized weights, which might change a choice.
    "float8, attention's projection": (
        Layer(2, 256, 128, dtype=BFLOAT16, weights=FLOAT8, attention=256),
        2,
    ),
    # An odd number of groups per row of the experts' downs, and batches of their rows.
    "int4": (Layer(2, 256, 256, 384, 32, rule(3), BFLOAT16, INT4, 128), 2),
    "int4, eight tokens with W_UV": (
        Layer(8, 256, 384, dtype=BFLOAT16, weights=INT4, attention=128, heads=2, latent=256),
        2,
    ),
    "int4, no shared experts": (
        dataclasses.replace(MOE, ffn=0, dtype=BFLOAT16, weights=INT4),
        3,
    ),
    "int8": (
        dataclasses.replace(MOE, width=256, dtype=BFLOAT16, weights=INT8, rule=rule(3)),
        2,
    ),
    "int8, attention's projection": (
        Layer(3, 256, 128, dtype=BFLOAT16, weights=INT8, attention=384),
        2,
    ),
    # Units of two heads in a CTA, and of a head in two CTAs.
    "W_UV": (
        dataclasses.replace(MOE, tokens=2, attention=384, heads=4, latent=128, rule=rule(1)),
        3,
    ),
    # Parts in two rounds of loads.
    "parts": (Layer(attention=128, heads=2, latent=256, split=(11,)), 2),
    # Two queries of a sequence that is split and of one that is not; heads in two CTAs.
    "queries in parts": (
        dataclasses.replace(PARTS, attention=384, heads=4, dtype=BFLOAT16, weights=BFLOAT16),
        3,
    ),
    "sequences in parts": (
        Layer(8, attention=128, heads=2, latent=256, split=(1, 2, 1, 8, 9, 1, 2, 3)),
        2,
    ),
}


@kernel_runs
@pytest.mark.slow
@pytest.mark.parametrize(("layer", "ctas"), INTERPRETED.values(), ids=list(INTERPRETED))
def test_kernel(layer, ctas, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "_INTERPRETED_CTAS", ctas)
    if ON_GPU and layer.dtype == FLOAT32:
        layer = dataclasses.replace(layer, dtype=BFLOAT16, weights=BFLOAT16)
    arguments = layer.arguments()
    got, chosen = mosaic_gpu.feed_forward(**arguments, **layer.options, interpret=INTERPRET)
    plain, routes = reference.feed_forward(**arguments, **layer.options)
    experts = weights = None
    if chosen is not None and routes is not None:
        np.testing.assert_array_equal(chosen.experts, routes.experts)
        np.testing.assert_allclose(chosen.weights, routes.weights, rtol=1e-5)
        np.testing.assert_allclose(chosen.scores, routes.scores, rtol=1e-5)
        experts, weights = routes.experts, routes.weights
    assert (experts is None) == (layer.rule is None)
    want = expected(arguments, experts, weights)
    check(got, want, tolerance(layer.dtype))
    if layer.dtype == BFLOAT16:
        # The kernel rounds less often than the plain path, so its error is no larger, except
        # where the last rounding decides.
        assert relative_error(got, want) <= 1.1 * relative_error(plain, want)


@kernel_runs
@pytest.mark.slow
def test_a_models_tokens_are_those_of_the_plain_path(monkeypatch):
    """A dense and an MoE layer of a tiny model, with a kernel for what follows attention."""
    raw = tiny_config(
        hidden_size=128, intermediate_size=128, moe_intermediate_size=128, n_routed_experts=32,
        num_experts_per_tok=1, num_hidden_layers=2, num_nextn_predict_layers=0,
        num_attention_heads=2, num_key_value_heads=2, v_head_dim=64, q_lora_rank=128,
        initializer_range=0.2,
    )  # fmt: skip
    dtype = jnp.bfloat16 if ON_GPU else jnp.float32
    model = DeepSeekV3(ModelConfig.from_hf(raw), rngs=nnx.Rngs(0), dtype=dtype)
    tokens = jnp.asarray([[3, 17]], jnp.int32)
    cache = LatentKVCache.init(model.cache_spec(), 1, 64)
    batch = TokenBatch(tokens, jnp.full((1,), 2, jnp.int32), cache.sequences, "absorbed")
    (plain_hidden,), _, plain_counts = model.extend_batches([batch], cache.pool)
    calls = []

    def by_kernel(*arrays, rule, **options):
        calls.append((rule is not None, options["o_proj"] is not None))
        run = functools.partial(mosaic_gpu.feed_forward, interpret=INTERPRET)
        return run(*arrays, rule=rule, **options)

    monkeypatch.setitem(BACKENDS, "mosaic_gpu", by_kernel)
    # The kernel before attention refuses these widths.
    model.use_feed_forward(("mosaic_gpu", "separate"))
    (hidden,), _, counts = model.extend_batches([batch], cache.pool)
    # Attention's projection is left to the kernel.
    assert calls == [(False, True), (True, True)]
    bound = 8 * tolerance(FLOAT32 if dtype == jnp.float32 else BFLOAT16)
    check(hidden.pre_norm[0], plain_hidden.pre_norm[0], bound)
    for ours, want in zip(counts, plain_counts, strict=True):
        np.testing.assert_array_equal(ours, want)
    got, plain = (model.logits(each.post_norm) for each in (hidden, plain_hidden))
    check(got[0], plain[0], bound)
    if dtype == jnp.float32:
        np.testing.assert_array_equal(jnp.argmax(got, -1), jnp.argmax(plain, -1))
