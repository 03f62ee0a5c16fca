"""Generator.use: which models it rejects, what it frees, what stays the same."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.model import DeepSeekV3
from dsv3_jax.offline.generator import Generator
from sharding import Placement
from tests.generation.fragments import MAX_LEN, letters
from tests.support.running import forward

PROMPT = letters("an experiment")


def fresh(model: DeepSeekV3) -> DeepSeekV3:
    """Copies a model, including its arrays."""
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda x: jnp.array(np.asarray(x)), state))


def test_the_model_before_is_freed(dense):
    first, second = fresh(dense), fresh(dense)
    generator = Generator(first, None, MAX_LEN, batch_sizes=(4,), prefill_chunk=16)
    want = generator.generate(PROMPT, max_new_tokens=5)[0].tokens
    watched = [weakref.ref(x) for x in (first, *jax.tree.leaves(nnx.state(first)))]
    assert len(watched) > 10
    del first
    generator.use(second)
    gc.collect()
    assert [w() for w in watched if w() is not None] == []
    assert generator.generate(PROMPT, max_new_tokens=5)[0].tokens == want


def test_a_model_of_another_config_is_refused(tiny, bare):
    """Its arrays are alike, but the compiled programs contain numbers of the first config."""
    other = fresh(tiny)
    other.config = dataclasses.replace(tiny.config, routed_scaling_factor=9.0)
    with pytest.raises(ValueError, match=r"config .* routed_scaling_factor 9\.0 instead of"):
        bare.use(other)


@pytest.mark.parametrize(("name", "value"), [("attn_impl", "CC"), ("dtype", np.dtype("float16"))])
def test_another_option_is_refused(tiny, bare, name, value):
    other = fresh(tiny)
    setattr(other, name, value)
    with pytest.raises(
        ValueError, match=f"model: expected the {name} of the model in use, .*, got"
    ):
        bare.use(other)


def test_other_module_options_are_refused(tiny, bare):
    """An option of a module, such as its quantization."""
    other = fresh(tiny)
    other.lm_head.float8_activations = True
    with pytest.raises(ValueError, match="model: expected the modules and options"):
        bare.use(other)


def test_other_arrays_are_refused(tiny, bare):
    other = fresh(tiny)
    weight = other.norm.weight
    weight.set_value(weight.get_value().astype(np.float16))
    with pytest.raises(ValueError, match="model: expected arrays like those of the model in use"):
        bare.use(other)


@pytest.mark.parametrize("wrong", [None, "demo", (1, 2)])
def test_no_model(bare, wrong):
    with pytest.raises(ValueError, match="model: expected a DeepSeekV3, got"):
        bare.use(wrong)


@pytest.mark.slow
def test_several_placements_of_one_model(tiny, bare):
    rng = np.random.default_rng(0)
    experts = tiny.config.n_routed_experts
    placements = [Placement.balanced(rng.zipf(1.5, (1, experts)), 16, 4, 2, 8) for _ in range(4)]
    settings = {"max_new_tokens": 12, "ignore_eos": True}
    want = bare.generate(PROMPT, **settings)[0].tokens
    generator = Generator(
        tiny.place_experts(placements[0]), None, MAX_LEN, batch_sizes=(4,), prefill_chunk=16
    )
    for placement in placements:
        generator.use(tiny.place_experts(placement))
        assert generator.generate(PROMPT, **settings)[0].tokens == want


def test_a_generator_leaves_its_models_as_they_were(tiny, bare):
    """generate, stream, warm_up and use leave arrays, options and outputs of models unchanged."""
    tokens = np.array([PROMPT], np.int32)
    other = fresh(tiny)
    models = (tiny, other)
    want = []
    for model in models:
        graph, state = nnx.split(model)
        want.append((graph, jax.tree.leaves(state), np.asarray(forward(model, tokens)[0])))
    settings = {"max_new_tokens": 4, "ignore_eos": True}
    for model in (*models, tiny):
        bare.use(model)
        bare.warm_up(2)
        bare.generate([PROMPT] * 2, **settings, temperature=1.0)
        assert list(bare.stream(PROMPT, **settings))
    for model, (graph, arrays, logits) in zip(models, want, strict=True):
        assert nnx.split(model)[0] == graph
        now = jax.tree.leaves(nnx.state(model))
        assert all(a is b for a, b in zip(now, arrays, strict=True))
        np.testing.assert_array_equal(forward(model, tokens)[0], logits)
