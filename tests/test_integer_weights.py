"""A model with integer weights computes the same as one with the dequantized values.

NumPy dequantizes the values here, in float32. The relative norm of the difference must be below
1e-5.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax import ModelConfig, presets
from dsv3_jax.checkpoint.parameters import published_tensors
from dsv3_jax.checkpoint.tensor_table import tensor_table
from dsv3_jax.initialization import abstract_model, parameter_count
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.layers.linear import Linear, Weight
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import INT4, INT8, IntegerQuantization
from tests.pallas_kernels.numerics import spread, unpack_int4
from tests.support.checkpoints import tiny_config
from tests.support.oracle import relative_error
from tests.support.running import extend, forward

BOUND = 1e-5
# Weights of the tiny config have at most 96 columns: one group of 128, or a last partial one of 16.
KINDS = {"int8": INT8, "int4": INT4, "int4 in 16s": IntegerQuantization(bits=4, group_size=16)}
TOKENS = np.random.default_rng(11).integers(0, 160, (2, 44))


def config(**overrides) -> ModelConfig:
    options = {"num_hidden_layers": 1, "first_k_dense_replace": 0}  # a MoE layer, and MTP's
    return ModelConfig.from_hf(tiny_config(**options, **overrides))


def filled(kind: IntegerQuantization) -> DeepSeekV3:
    """Returns a model with random integers, and scales for which weights are about 0.1."""
    rng = np.random.default_rng(0)
    graph, state = nnx.split(abstract_model(config(), quantization=kind))
    flat = []
    for path, variable in nnx.to_flat_state(state):
        want = variable.get_value()
        if want.dtype == jnp.int8:
            value = rng.integers(-127, 128, want.shape, np.int8)
        elif want.dtype == jnp.uint8:
            value = rng.integers(0, 256, want.shape, np.uint8)
        elif path[-1] == "weight_scale":
            step = 0.2 / (2 ** (kind.bits - 1) - 1)
            value = step * rng.uniform(0.5, 1.5, want.shape)
        else:
            value = rng.normal(0.0, 0.1, want.shape)
        flat.append((path, variable.replace(jax.device_put(value.astype(want.dtype)))))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def dense(model: DeepSeekV3) -> DeepSeekV3:
    """Returns the same model with dequantized float32 weights."""
    state = dict(nnx.to_flat_state(nnx.state(model)))
    graph, target = nnx.split(abstract_model(model.config))
    flat = []
    for path, variable in nnx.to_flat_state(target):
        value = np.asarray(state[path].get_value())
        if value.dtype in (np.int8, np.uint8):
            scale = np.asarray(state[(*path[:-1], "weight_scale")].get_value())
            if value.dtype == np.uint8:
                value = unpack_int4(value)
            group = 16 if scale.shape[-1] > 1 else value.shape[-1]
            value = value * spread(scale, (1, group), value.shape)
        flat.append((path, variable.replace(jnp.asarray(value, jnp.float32))))
    return nnx.merge(graph, nnx.from_flat_state(flat))


@dataclasses.dataclass(frozen=True)
class Pair:
    integers: DeepSeekV3
    dense: DeepSeekV3


@functools.cache
def pair_of(name: str) -> Pair:
    model = filled(KINDS[name])
    return Pair(model, dense(model))


@pytest.fixture(
    params=[pytest.param(kind, marks=() if kind == "int8" else pytest.mark.slow) for kind in KINDS]
)
def pair(request) -> Pair:
    return pair_of(request.param)


def of_kinds(*quick: tuple[str, str]):
    """Parametrizes over kinds and forms of attention. All cases except ``quick`` are slow."""
    return pytest.mark.parametrize(
        ("pair", "form"),
        [
            pytest.param(*case, marks=() if case in quick else pytest.mark.slow)
            for case in itertools.product(KINDS, ("expanded", "absorbed"))
        ],
        indirect=["pair"],
    )


@pytest.mark.slow
def test_whole_sequences_and_mtp(pair):
    """88 (token, expert) pairs for 8 experts: more rows than groups."""
    got, got_aux = forward(pair.integers, TOKENS)
    want, want_aux = forward(pair.dense, TOKENS)
    assert relative_error(got, want) < BOUND
    assert relative_error(got_aux.mtp_logits[0], want_aux.mtp_logits[0]) < BOUND
    np.testing.assert_array_equal(got_aux.routing_counts, want_aux.routing_counts)


@pytest.mark.slow
def test_without_jit(pair):
    tokens = jnp.asarray(TOKENS[:1, :2])  # six rows for 8 experts
    assert relative_error(pair.integers(tokens), forward(pair.dense, tokens)[0]) < BOUND


@pytest.mark.slow
@of_kinds(("int4 in 16s", "absorbed"))
def test_cached(pair, form):
    """Runs chunk by chunk; one token per sequence gives six rows for 8 experts."""
    chunk = {"expanded": 7, "absorbed": 1}[form]
    cache = LatentKVCache.init(pair.dense.cache_spec(), 2, 24, page_size=8)
    caches = [cache, cache]
    for start in range(0, 14, chunk):
        window = TOKENS[:, start : start + chunk]
        logits = []
        for i, model in enumerate((pair.integers, pair.dense)):
            out, caches[i] = extend(model, window, [chunk, chunk], caches[i], form)
            logits.append(out)
        assert relative_error(*logits) < BOUND


@functools.partial(jax.jit, static_argnums=(0, 6))
def draft(graph: nnx.GraphDef, state: nnx.State, hidden, tokens, counts, cache, form) -> jax.Array:
    model = nnx.merge(graph, state)
    out, _ = model.extend_mtp(hidden, tokens, jnp.zeros(2, jnp.int32), counts, cache, form)
    return model.logits(out.post_norm)


@pytest.mark.slow
@of_kinds(("int8", "absorbed"))
def test_cached_mtp(pair, form):
    hidden = np.random.default_rng(1).normal(size=(2, 5, 64)).astype(np.float32)
    tokens, counts = jnp.asarray(TOKENS[:, :5]), jnp.array([5, 3])
    cache = LatentKVCache.init(pair.dense.cache_spec(mtp=True), 2, 8, page_size=8)
    got, want = (
        draft(*nnx.split(model), jnp.asarray(hidden), tokens, counts, cache, form)
        for model in (pair.integers, pair.dense)
    )
    for sequence, count in enumerate(counts.tolist()):
        assert relative_error(got[sequence, :count], want[sequence, :count]) < BOUND


@pytest.mark.slow
def test_initial_weights_are_near_those_without_quantization():
    """Sampled with the same key, they differ by at most half a quantization step."""
    options = {"std": 0.02, "dtype": jnp.float32}
    for kind in KINDS.values():
        weight = Weight((3, 20, 40), rngs=nnx.Rngs(5), quantization=kind, **options)
        want = Weight((3, 20, 40), rngs=nnx.Rngs(5), **options).dense(jnp.float32)
        step = np.asarray(weight.scale).repeat(weight.block_shape[1], axis=-1)[..., :40]
        assert (np.abs(weight.dense(jnp.float32) - want) <= 0.501 * step).all()


def test_names_shapes_and_storage_are_the_table_s():
    for name, kind in KINDS.items():
        model = pair_of(name).integers
        of_kind = dataclasses.replace(model.config, quantization=kind, dtype="float32")
        stored = {np.int8: "I8", np.uint8: "U8", np.float32: "F32"}
        represented = {
            name.replace("weight_scale", "weight" + kind.scale_suffix): (
                tensor.shape,
                stored[tensor.dtype.type],
            )
            for name, tensor in published_tensors(model).items()
        }
        table = tensor_table(of_kind)
        assert represented == {name: (spec.shape, spec.dtype) for name, spec in table.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_columns(kind):
    """int4 packs pairs of columns; int8 does not."""
    options = {"std": 0.02, "rngs": nnx.Rngs(0), "dtype": jnp.float32, "quantization": KINDS[kind]}
    if kind == "int8":
        assert Linear(9, 4, **options)(jnp.ones((2, 9))).shape == (2, 4)
        return
    with pytest.raises(ValueError, match="packs columns in pairs: expected an even number, got 9"):
        Linear(9, 4, **options)
    with pytest.raises(ValueError, match="packs columns in pairs: expected an even number, got 47"):
        abstract_model(config(moe_intermediate_size=47), quantization=KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [INT8, INT4])
def test_parameters_of_deepseek_v2_lite(kind):
    model = abstract_model(presets.DEEPSEEK_V2_LITE, dtype=jnp.bfloat16, quantization=kind)
    assert parameter_count(model) == 15_706_484_224


@pytest.mark.slow
@pytest.mark.parametrize("kind", [INT8, INT4])
def test_parameters_of_deepseek_v3(kind):
    """A byte that packs two numbers counts as two, and scales do not count."""
    model = abstract_model(presets.DEEPSEEK_V3, dtype=jnp.bfloat16, quantization=kind)
    assert parameter_count(model) == 671_026_419_200
    assert parameter_count(model, mtp=True) == 11_610_068_224
