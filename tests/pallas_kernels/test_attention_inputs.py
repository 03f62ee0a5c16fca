"""attention_inputs: the reference in float64, the kernel in Pallas' interpreter."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.config import ModelConfig
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.overrides import few_tokens
from dsv3_jax.quantization import QUANTIZATIONS
from pallas_kernels import attention_inputs
from pallas_kernels.attention_inputs import mosaic_gpu, reference
from pallas_kernels.attention_inputs.api import BACKENDS
from pallas_kernels.attention_inputs.mosaic_gpu import Plan
from pallas_kernels.attention_inputs.reference import AttentionWeights
from pallas_kernels.decoder_layer import mosaic_gpu as layer_kernel
from pallas_kernels.decoder_layer.api import BACKENDS as LAYER_BACKENDS
from pallas_kernels.decoder_layer.reference import Projection
from pallas_kernels.hopper.split_kv import Parts
from tests.pallas_kernels.decoder_layer_cases import (
    BFLOAT16,
    FLOAT8,
    FLOAT32,
    INT4,
    INT8,
    exact_matrix,
    in_format,
    stored_dtype,
)
from tests.pallas_kernels.machine import INTERPRET, ON_GPU, kernel_runs, off_gpu
from tests.pallas_kernels.numerics import check, relative_error, rounded, tolerance
from tests.support.checkpoints import tiny_config

EPS, LATENT_EPS = 1e-5, 1e-6
OPTIONS: dict[str, Any] = {"eps": EPS, "latent_eps": LATENT_EPS}


@dataclasses.dataclass(frozen=True)
class Attention:
    """Sizes and dtypes. The widths are those that the kernel takes."""

    tokens: int = 1
    width: int = 128
    q_rank: int = 0
    heads: int = 2
    nope: int = 128
    rope: int = 16
    rank: int = 128
    dtype: str = FLOAT32
    weights: str = FLOAT32
    dropped: tuple[int, ...] = ()
    """Tokens that are not stored."""

    @property
    def shapes(self):
        """Shapes of the projections by name."""
        queries = self.heads * (self.nope + self.rope)
        shapes = {
            "q_proj": (queries, self.q_rank or self.width),
            "kv_a_proj": (self.rank + self.rope, self.width),
        }
        return shapes | ({"q_a_proj": (self.q_rank, self.width)} if self.q_rank else {})

    def arguments(self, seed=0):
        rng = np.random.default_rng(seed)

        def normal(*shape, scale=1.0):
            return jnp.asarray(rng.standard_normal(shape) * scale, jnp.float32)

        def projection(rows, columns):
            weight = normal(rows, columns, scale=columns**-0.5)
            return Projection(*in_format(weight, self.weights))

        def norm(width):
            return (1 + normal(width, scale=0.1)).astype(self.dtype)

        M, H, N, C = self.tokens, self.heads, self.nope, self.rank
        arrays = {name: projection(*shape) for name, shape in self.shapes.items()}
        if self.q_rank:
            arrays["q_a_norm"] = norm(self.q_rank)
        weights = AttentionWeights(
            norm=norm(self.width),
            kv_a_norm=norm(C),
            w_uk=normal(H, N, C, scale=N**-0.5).astype(self.dtype),
            **arrays,
        )
        angles = rng.uniform(0, 2 * np.pi, (M, self.rope // 2))
        slots = rng.permutation(12)[:M]
        slots[list(self.dropped)] = -1
        return {
            # Columns past a token's are zero, and remain so.
            "x": normal(M, self.width).astype(self.dtype),
            "weights": weights,
            "cos": jnp.asarray(1.3 * np.cos(angles), jnp.float32),
            "sin": jnp.asarray(1.3 * np.sin(angles), jnp.float32),
            "pages": jnp.pad(normal(3, 4, C + self.rope), ((0, 0), (0, 0), (0, 16))).astype(
                self.dtype
            ),
            "slots": jnp.asarray(slots, jnp.int32),
        }

    def expected(self, x, weights, cos, sin, pages, slots):
        """Returns the results in float64."""

        def f64(array):
            return rounded(array, array.dtype)

        def dense(projection):
            return exact_matrix(projection.weight, projection.scales)

        def norm(row, weight, eps):
            return row / np.sqrt(np.mean(row**2, axis=-1, keepdims=True) + eps) * f64(weight)

        def rotate(row):
            shape = len(row), *[1] * (row.ndim - 2), self.rope // 2
            c, s = (f64(each).reshape(shape) for each in (cos, sin))
            one, two = row[..., 0::2], row[..., 1::2]
            return np.concatenate([one * c - two * s, two * c + one * s], axis=-1)

        N, C = self.nope, self.rank
        n = compressed = norm(f64(x), weights.norm, EPS)
        if weights.q_a_proj is not None:
            compressed = norm(n @ dense(weights.q_a_proj).T, weights.q_a_norm, LATENT_EPS)
        q = (compressed @ dense(weights.q_proj).T).reshape(self.tokens, self.heads, -1)
        latent = n @ dense(weights.kv_a_proj).T
        stored = np.concatenate(
            [norm(latent[:, :C], weights.kv_a_norm, LATENT_EPS), rotate(latent[:, C:])], axis=-1
        )
        flat = f64(pages).reshape(-1, pages.shape[-1])
        for t, slot in enumerate(np.asarray(slots)):
            if slot >= 0:
                flat[slot, : C + self.rope] = stored[t]
        q_latent = np.einsum("mhn,hnc->mhc", q[..., :N], f64(weights.w_uk))
        return q_latent, rotate(q[..., N:]), flat.reshape(pages.shape)


# ---- the plan ------------------------------------------------------------------------------------


def plan_of(attention, ctas=132):
    return Plan.of(
        ctas=ctas, tokens=attention.tokens, width=attention.width, q_rank=attention.q_rank,
        rope=attention.rope, heads=attention.heads, nope=attention.nope, rank=attention.rank,
        eps=1e-5, latent_eps=1e-6, dtype=jnp.dtype(attention.dtype),
        weight_dtype=jnp.dtype(stored_dtype(attention.weights)), interpret=None,
    )  # fmt: skip


MOONLIGHT = Attention(1, 2048, 0, 16, 128, 64, 512, BFLOAT16, BFLOAT16)
MOONLIGHT_INT4 = dataclasses.replace(MOONLIGHT, weights=INT4)
V3 = Attention(1, 7168, 1536, 128, 128, 64, 512, BFLOAT16, FLOAT8)


@pytest.mark.parametrize("ctas", [132, 7])
@pytest.mark.parametrize(
    "attention", [MOONLIGHT, V3, MOONLIGHT_INT4], ids=["moonlight", "v3", "moonlight int4"]
)
def test_ctas_share_every_unit_once(attention, ctas):
    for phase in plan_of(attention, ctas).phases:
        units = [
            unit
            for cta in range(ctas)
            for unit in range((cta + phase.shift) % ctas, phase.units, ctas)
        ]
        assert sorted(units) == list(range(phase.units)), phase.name


@pytest.mark.parametrize(
    ("attention", "megabytes"),
    [
        (MOONLIGHT, (2 * 2048 * (16 * 192 + 576) + 2 * 16 * 128 * 512) / 1e6),
        (V3, (7168 * (1536 + 576) + 1536 * 128 * 192 + 2 * 128 * 128 * 512) / 1e6),
        (MOONLIGHT_INT4, (2048 * (16 * 192 + 576) / 2 + 2 * 16 * 128 * 512) / 1e6),
    ],
    ids=["moonlight", "v3", "moonlight int4"],
)
def test_phases_read_every_weight_once(attention, megabytes):
    plan = plan_of(attention)
    pieces, total = plan.pieces, 0
    for phase in plan.phases:
        if phase.operand is not None:
            total += phase.units * 16 * phase.operand.steps * phase.operand.step_bytes
        elif phase.name == "w_uk":
            total += phase.units * pieces.steps * pieces.rows * pieces.width * 2
    assert total / 1e6 == pytest.approx(megabytes)


def test_pieces_of_w_uk():
    """Moonlight's 16 heads are 128 pieces, V3's heads are a piece each: 4 of 132 CTAs have
    none. Moonlight's weights all fit the ring, so that its producer need not wait."""
    moonlight, v3 = plan_of(MOONLIGHT), plan_of(V3)
    assert [plan.pieces.width for plan in (moonlight, v3)] == [64, 512]
    assert [plan.pieces.heads * plan.pieces.per_head for plan in (moonlight, v3)] == [128, 128]
    assert [plan.pieces.steps for plan in (moonlight, v3)] == [1, 8]
    assert [plan.waits for plan in (moonlight, v3)] == [False, True]
    assert (moonlight.most_stages, moonlight.stages.count) == (9, 12)
    assert plan_of(dataclasses.replace(V3, tokens=8, weights=INT4)).stages.count == 4


REFUSED = [
    ({"tokens": 9}, "1 to 8 tokens, got 9"),
    ({"width": 192}, "hidden widths of a multiple of 128, got 192"),
    ({"nope": 32}, "head widths of a multiple of 64, got 32"),
    ({"rank": 192}, "latent widths of a multiple of 128, got 192"),
    ({"q_rank": 192}, "q_lora widths of a multiple of 128, got 192"),
    ({"rope": 12}, "rope widths of a multiple of 8, got 12"),
    ({"width": 14336, "tokens": 8}, "takes 3 ring stages of"),
    ({"dtype": FLOAT32}, "takes bfloat16 activations, W_UK and pages, got float32"),
    (
        {"weights": "float16"},
        "bfloat16, or of float8_e4m3fn, int8 or int4 with scales, got float16",
    ),
    ({"weights": FLOAT8, "tokens": 5}, "1 to 4 tokens for float8_e4m3fn matrices, got 5"),
    ({"weights": INT4, "rope": 8}, "kv_a_proj of uint8 with a multiple of 16 rows, got 136"),
]


@off_gpu
@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refusals(changes, message, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda interpret: None)
    sizes = {"dtype": BFLOAT16, "weights": BFLOAT16} | changes
    shapes = jax.eval_shape(Attention(**sizes).arguments)
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(lambda given: mosaic_gpu.attention_inputs(**given, **OPTIONS), shapes)


@off_gpu
def test_it_needs_a_hopper_gpu():
    with pytest.raises(NotImplementedError, match="runs on Hopper GPUs"):
        attention_inputs(**Attention().arguments(), **OPTIONS, implementation="mosaic_gpu")


def test_the_kernel_is_not_the_default():
    assert next(iter(BACKENDS)) == "reference"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cos": jnp.ones((1, 4))}, r"q_proj: expected shape \(272, 128\), got \(288, 128\)"),
        ({"pages": jnp.ones((3, 4, 128))}, "pages: expected 144 columns or more, got 128"),
        ({"weights": {"q_a_norm": jnp.ones(8)}}, "q_a_proj and q_a_norm: expected both"),
        ({"weights": {"kv_a_norm": jnp.ones(8)}}, r"kv_a_norm: expected shape \(128,\), got"),
    ],
)
def test_wrong_arguments(changes, message, untyped):
    arguments = Attention().arguments()
    weights = arguments["weights"]._replace(**changes.get("weights", {}))
    with pytest.raises(ValueError, match=message):
        attention_inputs(**arguments | changes | {"weights": weights}, **OPTIONS)


# ---- results -------------------------------------------------------------------------------------

# Sizes, and how many CTAs the interpreter runs.
CASES = {
    "one token": (Attention(), 2),
    # More CTAs than units of a phase, a token that is not stored, pieces in several stages.
    "tokens": (
        Attention(3, 256, heads=3, nope=256, dtype=BFLOAT16, weights=BFLOAT16, dropped=(1,)),
        3,
    ),
    "float8": (Attention(4, 256, dtype=BFLOAT16, weights=FLOAT8, dropped=(2,)), 3),
    "rank, float8": (
        Attention(1, 256, q_rank=128, rope=8, rank=256, dtype=BFLOAT16, weights=FLOAT8),
        2,
    ),
    "int4, eight tokens": (Attention(8, 256, dtype=BFLOAT16, weights=INT4, dropped=(2,)), 3),
    "rank, int4": (Attention(1, 256, q_rank=128, rank=256, dtype=BFLOAT16, weights=INT4), 2),
    "int8": (Attention(2, 384, dtype=BFLOAT16, weights=INT8), 2),
    "rank": (Attention(q_rank=256, rope=24), 2),
    # Heads that are no multiple of a warpgroup's threads.
    "heads of 64": (Attention(3, heads=3, nope=64, rank=256, dropped=(0,)), 3),
    "heads of 192, rank": (
        Attention(2, 256, q_rank=128, nope=192, dtype=BFLOAT16, weights=BFLOAT16),
        2,
    ),
}


@pytest.mark.parametrize(
    "attention",
    [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if case.q_rank else [])
        for name, (case, _) in CASES.items()
    ],
)
def test_reference(attention):
    weights = FLOAT32 if attention.weights == BFLOAT16 else attention.weights
    attention = dataclasses.replace(attention, dtype=FLOAT32, weights=weights)
    arguments = attention.arguments()
    got = attention_inputs(**arguments, **OPTIONS)
    for result, want in zip(got, attention.expected(**arguments), strict=True):
        check(result, want, tolerance(FLOAT32))


@kernel_runs
@pytest.mark.slow
@pytest.mark.parametrize(("attention", "ctas"), CASES.values(), ids=list(CASES))
def test_kernel(attention, ctas, monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "_INTERPRETED_CTAS", ctas)
    if not ON_GPU and attention.tokens == 1:  # weights that would fit the ring
        monkeypatch.setattr(Plan, "waits", False)
    if ON_GPU and attention.dtype == FLOAT32:
        attention = dataclasses.replace(attention, dtype=BFLOAT16, weights=BFLOAT16)
    arguments = attention.arguments()
    got = mosaic_gpu.attention_inputs(**arguments, **OPTIONS, interpret=INTERPRET)
    plain = reference.attention_inputs(**arguments, **OPTIONS)
    wanted = attention.expected(**arguments)
    for name, result, other, want in zip(got._fields, got, plain, wanted, strict=True):
        assert (result.dtype, result.shape) == (attention.dtype, want.shape), name
        # With q_a_proj, two norms are rounded before the result is.
        check(result, want, tolerance(attention.dtype) * (2 if attention.q_rank else 1))
        if attention.dtype == BFLOAT16:
            # The kernel rounds less often than the plain path.
            assert relative_error(result, want) <= 1.1 * relative_error(other, want), name
    # All that is not of the stored tokens is unchanged, bit by bit.
    flat = [each.reshape(-1, each.shape[-1]) for each in (got.pages, arguments["pages"])]
    others = np.setdiff1d(np.arange(len(flat[0])), arguments["slots"])
    np.testing.assert_array_equal(flat[0][others], flat[1][others])
    np.testing.assert_array_equal(flat[0][:, -16:], 0)


@kernel_runs
@pytest.mark.slow
@pytest.mark.parametrize(
    ("q_rank", "nope", "rank", "weights", "most_merged", "in_parts"),
    [
        (None, 128, 128, None, 64, False),  # parts have a multiple of 256 columns
        (128, 64, 256, None, 63, False),
        (None, 128, 256, "int4", 64, True),
    ],
)
def test_a_models_tokens_are_those_of_the_plain_path(
    q_rank, nope, rank, weights, most_merged, in_parts, monkeypatch
):
    """A step of two sequences with different numbers of tokens, and one with a token for each."""
    raw = tiny_config(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, first_k_dense_replace=1,
        num_nextn_predict_layers=0, num_attention_heads=2, num_key_value_heads=2,
        qk_nope_head_dim=nope, qk_rope_head_dim=16, v_head_dim=64, kv_lora_rank=rank,
        q_lora_rank=q_rank, initializer_range=0.2,
    )  # fmt: skip
    dtype = jnp.bfloat16 if ON_GPU or weights else jnp.float32
    quantization = QUANTIZATIONS[weights or "bf16"]
    config = ModelConfig.from_hf(raw)
    model = DeepSeekV3(config, rngs=nnx.Rngs(0), dtype=dtype, quantization=quantization)
    cache = LatentKVCache.init(model.cache_spec(), 2, 64)
    tokens, calls = jnp.asarray([[3, 17], [5, 0]], jnp.int32), []

    def two_steps():
        hidden, cached = model.extend(tokens, jnp.asarray([2, 1]), cache, "absorbed")
        first = jnp.argmax(model.logits(hidden.post_norm), axis=-1)
        newest = jnp.take_along_axis(first, jnp.asarray([[1], [0]]), axis=1)
        hidden, cached = model.extend(newest, jnp.ones(2, jnp.int32), cached, "absorbed")
        return model.logits(hidden.post_norm), newest, cached

    def by_kernel(*arrays, **options):
        calls.append(arrays[1].w_uk.shape)
        return mosaic_gpu.attention_inputs(*arrays, **options, interpret=INTERPRET)

    def second_half(*arrays, **options):
        assert options["w_uv"].shape == (2, 64, rank)
        assert isinstance(options["attended"], Parts) == in_parts
        return layer_kernel.feed_forward(*arrays, **options, interpret=INTERPRET)

    plain, plain_newest, plain_cache = two_steps()
    monkeypatch.setitem(BACKENDS, "mosaic_gpu", by_kernel)
    monkeypatch.setitem(LAYER_BACKENDS, "mosaic_gpu", second_half)
    monkeypatch.setattr(few_tokens, "MOST_MERGED", most_merged)  # 64 are in the block tables
    model.use_feed_forward("mosaic_gpu")
    got, newest, cached = two_steps()
    assert calls == [(2, nope, rank)] * 2
    bound = 8 * tolerance(FLOAT32 if dtype == jnp.float32 else BFLOAT16)
    check(got, plain, bound)
    for pages, others in zip(jax.tree.leaves(cached), jax.tree.leaves(plain_cache), strict=True):
        check(pages, others, bound)
    if dtype == jnp.float32:
        np.testing.assert_array_equal(newest, plain_newest)
        np.testing.assert_array_equal(jnp.argmax(got, -1), jnp.argmax(plain, -1))
