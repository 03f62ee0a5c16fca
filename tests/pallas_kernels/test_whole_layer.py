"""A whole decoder layer in one kernel, in Pallas' interpreter or on a GPU."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.config import ModelConfig
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.model import DeepSeekV3
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.whole_layer import mosaic_gpu, reference
from pallas_kernels.whole_layer.api import BACKENDS, whole_layer
from pallas_kernels.whole_layer.plan import Config
from pallas_kernels.whole_layer.reference import Cached, LayerWeights
from tests.pallas_kernels.decoder_layer_cases import (
    BFLOAT16,
    FLOAT8,
    FLOAT32,
    INT4,
    INT8,
    Layer,
    expected,
    rule,
)
from tests.pallas_kernels.machine import INTERPRET, ON_GPU, kernel_runs, off_gpu
from tests.pallas_kernels.numerics import check, relative_error, tolerance
from tests.pallas_kernels.test_attention_inputs import Attention
from tests.support.checkpoints import tiny_config

OPTIONS: dict[str, Any] = {"scale": 0.08, "eps": 1e-5, "latent_eps": 1e-6, "after_eps": 1e-6}


@dataclasses.dataclass(frozen=True)
class Whole:
    """Sizes and settings. On a GPU the latents have 512 columns and the rope keys 64."""

    layer: Layer
    q_rank: int = 0
    heads: int = 16
    rank: int = 512 if ON_GPU else 256
    rope: int = 64 if ON_GPU else 16
    cached: int = 70
    """Tokens that were cached before."""
    pages: int = 4
    """Pages of the block table."""

    @property
    def options(self) -> dict[str, Any]:
        return OPTIONS | {"rule": self.layer.rule}

    @property
    def before(self) -> Attention:
        layer = self.layer
        return Attention(
            layer.tokens, layer.width, self.q_rank, self.heads, 128, self.rope, self.rank,
            layer.dtype, layer.weights,
        )  # fmt: skip

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        value_width = 16
        layer = dataclasses.replace(
            self.layer, attention=self.heads * value_width, heads=self.heads, latent=self.rank
        )
        before, after = self.before.arguments(seed), layer.arguments(seed + 1)
        T, columns = layer.tokens, self.rank + self.rope
        positions = self.cached + np.arange(T)
        table = rng.permutation(self.pages + 2)[: self.pages]
        stored = rng.standard_normal((self.pages + 2, 64, columns))
        # Nothing after the cached tokens is a number, neither are other pages.
        for page in range(self.pages + 2):
            own = np.flatnonzero(table == page)
            known = max(0, self.cached - 64 * own[0]) if len(own) else 0
            stored[page, known:] = np.nan
        return {
            "x": before["x"],
            "before": before["weights"],
            "after": LayerWeights(
                after["w_uv"], after["o_proj"], after["norm"], after["router"], after["shared"],
                after["routed"],
            ),
            "cos": before["cos"] / 1.3,
            "sin": before["sin"] / 1.3,
            "cached": Cached(
                jnp.asarray(stored, layer.dtype),
                jnp.asarray(table[positions // 64] * 64 + positions % 64, jnp.int32),
                jnp.asarray(table, jnp.int32),
                jnp.asarray([self.cached], jnp.int32),
            ),
        }  # fmt: skip

    def expected(self, arguments: dict[str, Any], experts: Any, weights: Any) -> Any:
        """Returns output and pages in float64, for the experts that were chosen."""
        pages, slots, table, _ = arguments["cached"]
        q_latent, q_rope, stored = self.before.expected(
            arguments["x"], arguments["before"], arguments["cos"], arguments["sin"],
            pages, slots,
        )  # fmt: skip
        tokens = stored[np.asarray(table)].reshape(-1, stored.shape[-1])
        q, attended = np.concatenate([q_latent, q_rope], axis=-1), []
        for t in range(self.layer.tokens):
            seen = tokens[: self.cached + t + 1]
            scores = np.exp(OPTIONS["scale"] * q[t] @ seen.T)
            attended.append(scores @ seen[:, : self.rank] / scores.sum(axis=-1, keepdims=True))
        after = arguments["after"]
        flat = np.stack(attended).reshape(self.layer.tokens, -1)
        given = after._asdict() | {"h": arguments["x"], "attended": jnp.asarray(flat, jnp.float32)}
        return expected(given, experts, weights), stored


MOE = Layer(expert_ffn=128, experts=32, rule=rule(2))
# The interpreter has threads for two programs of this kernel.
CASES = {
    "dense": (Whole(Layer()), {}),
    "bfloat16": (Whole(dataclasses.replace(MOE, dtype=BFLOAT16, weights=BFLOAT16)), {}),
    # The first token of a page; two groups of heads, and two pages in a part.
    "rank, float8": (
        Whole(Layer(1, 256, 128, dtype=BFLOAT16, weights=FLOAT8), q_rank=128, heads=32, cached=64),
        {"packed": True},
    ),
    # The last token of a page.
    "int4": (
        Whole(Layer(1, 256, 256, 128, 32, rule(2), BFLOAT16, INT4), cached=127),
        {"packed": True},
    ),
    # A program without attention.
    "int8, first token": (
        Whole(Layer(1, 128, 128, dtype=BFLOAT16, weights=INT8), cached=0),
        {"packed": True},
    ),
}


def config(**settings: Any) -> Config:
    """Returns few programs and stages for the interpreter, all of the GPU's there."""
    few = {"programs": 2, "stages": 3}
    return Config(**({"programs": multiprocessors()} if ON_GPU else few), **settings)


@kernel_runs
@pytest.mark.slow
@pytest.mark.parametrize(("whole", "settings"), CASES.values(), ids=list(CASES))
def test_kernel(whole, settings):
    if ON_GPU and whole.layer.dtype == FLOAT32:
        layer = dataclasses.replace(whole.layer, dtype=BFLOAT16, weights=BFLOAT16)
        whole = dataclasses.replace(whole, layer=layer)
    arguments = whole.arguments()
    got = mosaic_gpu.whole_layer(
        **arguments, **whole.options, config=config(**settings), interpret=INTERPRET
    )
    plain = reference.whole_layer(**arguments, **whole.options)
    experts = weights = None
    if got.chosen is not None and plain.chosen is not None:
        np.testing.assert_array_equal(got.chosen.experts, plain.chosen.experts)
        experts, weights = plain.chosen.experts, plain.chosen.weights
    out, stored = whole.expected(arguments, experts, weights)
    bound = tolerance(whole.layer.dtype)
    check(got.out, out, 2 * bound)
    if whole.layer.dtype == BFLOAT16:
        assert relative_error(got.out, out) <= 1.1 * relative_error(plain.out, out)
    slots = np.asarray(arguments["cached"].slots)
    flat = [
        np.asarray(each, np.float64).reshape(-1, stored.shape[-1]) for each in (got.pages, stored)
    ]
    check(flat[0][slots], flat[1][slots], 2 * bound)
    # All that is not of the new tokens is unchanged, bit by bit.
    before = np.asarray(arguments["cached"].pages, np.float64).reshape(flat[0].shape)
    others = np.setdiff1d(np.arange(len(before)), slots)
    np.testing.assert_array_equal(flat[0][others], before[others])


@kernel_runs
@pytest.mark.slow
def test_a_models_tokens_are_those_of_the_plain_path(monkeypatch):
    """A step of one token of one sequence: a dense and an MoE layer."""
    raw = tiny_config(
        hidden_size=128, intermediate_size=128, moe_intermediate_size=128, n_routed_experts=32,
        num_experts_per_tok=1, num_hidden_layers=2, num_nextn_predict_layers=0,
        num_attention_heads=16, num_key_value_heads=16, qk_nope_head_dim=128,
        qk_rope_head_dim=64 if ON_GPU else 16, v_head_dim=16, kv_lora_rank=512 if ON_GPU else 256,
        q_lora_rank=None, initializer_range=0.2,
    )  # fmt: skip
    dtype = jnp.bfloat16 if ON_GPU else jnp.float32
    model = DeepSeekV3(ModelConfig.from_hf(raw), rngs=nnx.Rngs(0), dtype=dtype)
    cache = LatentKVCache.init(model.cache_spec(), 1, 64)
    _, cache = model.extend(jnp.asarray([[3]], jnp.int32), jnp.asarray([1]), cache, "absorbed")
    tokens, calls = jnp.asarray([[17]], jnp.int32), []

    def step():
        hidden, cached = model.extend(tokens, jnp.asarray([1]), cache, "absorbed")
        return model.logits(hidden.post_norm), cached

    def by_kernel(*arrays, **options):
        calls.append((len(arrays[0]), options["rule"] is not None))
        return mosaic_gpu.whole_layer(*arrays, **options, config=config(), interpret=INTERPRET)

    plain, plain_cache = step()
    monkeypatch.setitem(BACKENDS, "mosaic_gpu", by_kernel)
    model.use_feed_forward("whole_layer")
    got, cached = step()
    assert calls == [(1, False), (1, True)]
    bound = 8 * tolerance(FLOAT32 if dtype == jnp.float32 else BFLOAT16)
    check(got, plain, bound)
    for pages, others in zip(jax.tree.leaves(cached), jax.tree.leaves(plain_cache), strict=True):
        check(pages, others, bound)


@off_gpu
@pytest.mark.slow
def test_steps_that_the_kernel_does_not_take(untyped):
    """A layer that names only the kernel fails. One that names others too runs on the next."""
    model = DeepSeekV3(ModelConfig.from_hf(tiny_config()), rngs=nnx.Rngs(0), dtype=jnp.float32)
    cache = LatentKVCache.init(model.cache_spec(), 2, 64)
    step = jnp.asarray([[3], [17]], jnp.int32), jnp.ones(2, jnp.int32), cache, "absorbed"
    plain, _ = model.extend(*step)
    model.use_feed_forward("whole_layer")
    with pytest.raises(NotImplementedError, match="one sequence, got several"):
        model.extend(*step)
    with pytest.raises(NotImplementedError, match="whole_layer takes whole layers with a cache"):
        model(step[0])
    model.use_feed_forward(("whole_layer", "separate"))
    np.testing.assert_array_equal(model.extend(*step)[0].pre_norm, plain.pre_norm)


@off_gpu
def test_it_needs_a_hopper_gpu():
    whole = CASES["dense"][0]
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs"):
        whole_layer(**whole.arguments(), **whole.options, implementation="mosaic_gpu")


def test_the_kernel_is_not_the_default():
    assert next(iter(BACKENDS)) == "reference"


# ---- the plan ------------------------------------------------------------------------------------

MOONLIGHT = Whole(Layer(1, 2048, 2816, 1408, 64, rule(6), BFLOAT16, BFLOAT16), rank=512, rope=64)


def shapes_of(whole: Whole, pages: int = 128) -> dict[str, Any]:
    """Returns the shapes of the arguments, with heads' values of 128 columns."""
    before = jax.eval_shape(whole.before.arguments)
    layer = dataclasses.replace(
        whole.layer, attention=whole.heads * 128, heads=whole.heads, latent=whole.rank
    )
    after = layer.shapes()
    int32: Any = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    stored: Any = jax.ShapeDtypeStruct((8, 64, whole.rank + whole.rope), layer.dtype)
    names = "w_uv", "o_proj", "norm", "router", "shared", "routed"
    return {
        "x": before["x"],
        "before": before["weights"],
        "after": LayerWeights(*(after[name] for name in names)),
        "cos": before["cos"],
        "cached": Cached(stored, int32((layer.tokens,)), int32((pages,)), int32((1,))),
    }


@pytest.mark.parametrize("weights", [BFLOAT16, FLOAT8, INT4])
def test_stages_of_the_plans(weights, untyped):
    """More than 128 KiB of weights are in flight. All those before attention fit."""
    whole = dataclasses.replace(
        MOONLIGHT, layer=dataclasses.replace(MOONLIGHT.layer, weights=weights)
    )
    settings = Config(132, packed=weights != BFLOAT16)
    plan = mosaic_gpu.make_plan(**shapes_of(whole), **whole.options, config=settings)
    assert plan.before.stages == plan.after.stages
    assert plan.after.stages.stage_bytes == 16 * 1088
    assert (plan.after.stages.count, plan.before.config.ahead) == (10, "always")


@pytest.mark.parametrize(
    ("changes", "pages", "message"),
    [
        ({"tokens": 2}, 128, "takes 1 token, got 2"),
        ({}, 129, "8192 positions at most, got 8256"),
        ({"dtype": FLOAT32}, 128, "takes bfloat16 activations, W_UK and pages, got float32"),
    ],
)
def test_refusals(changes, pages, message, untyped):
    whole = dataclasses.replace(MOONLIGHT, layer=dataclasses.replace(MOONLIGHT.layer, **changes))
    with pytest.raises(NotImplementedError, match=message):
        mosaic_gpu.make_plan(**shapes_of(whole, pages), **whole.options, config=Config(132))
