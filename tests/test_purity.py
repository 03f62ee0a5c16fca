"""Methods return results and leave their model and arguments unchanged.

Setters change the model they are called on and no other, though models share arrays. What a model
computes follows from its graph and its arrays, so these are compared: nothing is compiled. A
Trainer's case is in tests/training/test_steps.py, whose compiled steps it shares.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax import ModelConfig
from dsv3_jax.checkpoint.parameters import published_tensors
from dsv3_jax.checkpoint.writer import write_checkpoint
from dsv3_jax.initialization import abstract_model, parameter_count
from dsv3_jax.inspection import What, capture
from dsv3_jax.kv_cache import CacheSpec, LatentKVCache
from dsv3_jax.layers.paged_cache import Form
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import INT4, BlockQuantization
from sharding import Placement, make_layout
from tests.support.checkpoints import tiny_config
from tests.support.filled import filled_model
from tests.support.unchanged import Snapshot

CONFIG = ModelConfig.from_hf(tiny_config(num_hidden_layers=2))  # a dense layer, a MoE, and MTP's
PLACEMENTS = [
    Placement.from_phy2log(np.tile(np.roll(np.arange(8), 1), (2, 1)), 8),
    Placement.balanced(np.random.default_rng(1).zipf(1.5, (2, 8)), 16, 4, 2, 8),
    Placement.identity(2, 8, 16),
]


def arrays(model: DeepSeekV3) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(model))


def assert_placed(model: DeepSeekV3, base: DeepSeekV3, placement: Placement) -> None:
    """Every slot holds the weights and scales of its expert in ``base``, bit for bit."""
    for moe, original, phy2log in zip(
        model.moe_layers(), base.moe_layers(), np.asarray(placement.phy2log), strict=True
    ):
        want = dict(nnx.to_flat_state(nnx.state(original.experts)))
        for path, variable in nnx.to_flat_state(nnx.state(moe.experts)):
            logical, physical = (np.asarray(v.get_value()) for v in (want[path], variable))
            np.testing.assert_array_equal(
                physical.view(np.uint8), logical[phy2log].view(np.uint8), err_msg=str(path)
            )


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 160, (2, 5)), jnp.int32)
COUNTS = jnp.array([5, 3], jnp.int32)
CACHE = LatentKVCache.init(CacheSpec.of_config(CONFIG, jnp.float32, mtp=True), 2, 16)
CACHE = dataclasses.replace(
    CACHE, routing_counts=jnp.zeros((2, CONFIG.n_routed_experts), jnp.int32)
)
HIDDEN = jnp.ones((2, 5, CONFIG.hidden_size))


def program(run: Callable[[], Any]) -> str:
    """Returns the program of a call. Tracing runs all of our code on the model itself."""
    return str(jax.make_jaxpr(run)())


# For each method: its arguments and the call.
METHODS: dict[str, tuple[tuple[Any, ...], Callable[[DeepSeekV3, Path], Any]]] = {
    "__call__": ((TOKENS,), lambda model, _: program(lambda: model(TOKENS))),
    "__call__, aux": ((TOKENS,), lambda model, _: program(lambda: model(TOKENS, return_aux=True))),
    "capture": (
        (TOKENS,),
        lambda model, _: program(lambda: capture(model, TOKENS, get_args(What))),
    ),
    **{
        f"extend, {form}": (
            (TOKENS, COUNTS, CACHE),
            lambda model, _, form=form: program(lambda: model.extend(TOKENS, COUNTS, CACHE, form)),
        )
        for form in get_args(Form)
    },
    "extend_mtp": (
        (HIDDEN, TOKENS, COUNTS, CACHE),
        lambda model, _: program(
            lambda: model.extend_mtp(HIDDEN, TOKENS, COUNTS, COUNTS, CACHE, "absorbed")
        ),
    ),
    "place_experts": ((PLACEMENTS[1],), lambda model, _: model.place_experts(PLACEMENTS[1])),
    "check_placement": (
        (PLACEMENTS[1],),
        lambda model, _: model.check_placement(PLACEMENTS[1], make_layout("dp_attention_ep")),
    ),
    "precompute_for_decode": ((), lambda model, _: model.precompute_for_decode()),
    "parameter_count": ((), lambda model, _: parameter_count(model)),
    "published_tensors": ((), lambda model, _: published_tensors(model)),
    "write_checkpoint": ((), lambda model, path: write_checkpoint(model, path / "out")),
}


@pytest.fixture(scope="module")
def plain() -> DeepSeekV3:
    return filled_model(CONFIG)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", ["plain", "placed and precomputed"])
def test_a_method_changes_neither_its_model_nor_its_arguments(kind, name, plain, tmp_path):
    model = plain if kind == "plain" else plain.place_experts(PLACEMENTS[2]).precompute_for_decode()
    arguments, call = METHODS[name]
    before = Snapshot(model, plain, *arguments)
    call(model, tmp_path)
    before.check()


SETTERS: dict[str, Callable[[DeepSeekV3], None]] = {
    "use_float8_activations": lambda model: model.use_float8_activations(),
    "use_attn_impl": lambda model: model.use_attn_impl("CC"),
    "lay_out": lambda model: model.lay_out(make_layout("single")),
}


@pytest.mark.parametrize("name", SETTERS)
def test_a_setter_changes_no_other_model(name):
    """It changes neither the model's origin nor models derived from it earlier."""
    model = filled_model(CONFIG, BlockQuantization())
    derived = {
        "placed": model.place_experts(PLACEMENTS[1]),
        "precomputed": model.precompute_for_decode(),
        "merged": nnx.merge(*nnx.split(model)),
    }
    before = {key: Snapshot(each) for key, each in (derived | {"model": model}).items()}
    logits = program(lambda: model(TOKENS))
    SETTERS[name](model)
    for key in derived:
        before[key].check()
    # The other setters change caches, or computations with many tokens, but not this one.
    if name != "lay_out":
        assert program(lambda: model(TOKENS)) == logits
    before_derived = Snapshot(model)
    for each in derived.values():
        SETTERS[name](each)
        before_derived.check()


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, BlockQuantization(), INT4])
def test_placing_does_not_change_the_model(quantization):
    """It works any number of times from one model, also from a placed one."""
    base = filled_model(CONFIG, quantization)
    before = arrays(base)
    for placement in PLACEMENTS:
        placed = base.place_experts(placement)
        assert_placed(placed, base, placement)
        placed_arrays = arrays(placed)
        for other in PLACEMENTS:
            assert_placed(placed.place_experts(other), base, other)
        assert all(a is b for a, b in zip(arrays(placed), placed_arrays, strict=True))
    assert all(a is b for a, b in zip(arrays(base), before, strict=True))


def test_placing_on_a_mesh_does_not_change_the_model():
    base = filled_model(CONFIG, layout=make_layout("dp_attention_ep"))
    before = arrays(base)
    for placement in PLACEMENTS[1:]:
        placed = base.place_experts(placement)
        assert_placed(placed, base, placement)
        stack = placed.moe_layers()[0].experts.up_proj.weight.get_value()
        assert stack.sharding.shard_shape(stack.shape)[0] == 2
    assert all(a is b for a, b in zip(arrays(base), before, strict=True))


@pytest.mark.usefixtures("untyped")
def test_a_placement_must_be_a_placement():
    with pytest.raises(ValueError, match=r"^placement: expected a Placement, got ndarray; .* one$"):
        abstract_model(CONFIG).place_experts(np.zeros((2, 8), np.int32))  # pyright: ignore
