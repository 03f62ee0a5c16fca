"""Rules shard arrays by their logical axes, and refuse invalid shardings by name."""

import dataclasses
import functools
import re

import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from dsv3_jax import presets
from dsv3_jax.initialization import abstract_model
from dsv3_jax.layers.logical_axes import _stored_block, logical_axes, parameter_shardings
from dsv3_jax.quantization import INT4, INT8, BlockQuantization, IntegerQuantization
from sharding import DEFAULT_RULES, MESH_AXES, Rules, make_mesh

RULES = Rules({"rows": "tensor", "columns": None, "expert": "expert", "all": ("data", "expert")})


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=2, expert=2, tensor=2)


@pytest.mark.parametrize(
    ("shape", "axes", "spec"),
    [
        ((6, 5), ("rows", "columns"), P("tensor", None)),
        ((4, 6, 5), ("expert", "rows", "columns"), P("expert", "tensor", None)),
        ((8, 6), ("all", "rows"), P(("data", "expert"), "tensor")),
        ((5,), ("columns",), P(None)),
        ((4, 5), ("rows", None), P("tensor", None)),
        ((), (), P()),
    ],
)
def test_shardings(mesh, shape, axes, spec):
    got = RULES.sharding(mesh, "x", shape, axes)
    assert got.mesh == mesh
    assert got.spec == spec


def test_an_axis_of_one_device_divides_everything():
    mesh = make_mesh(data=8)
    sharding = DEFAULT_RULES.sharding(mesh, "x", (3, 5), ("heads", "hidden"), (2, 2))
    assert sharding.is_fully_replicated


def refusal(mesh, shape, axes, block=None, rules=RULES):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        rules.sharding(mesh, "some.weight", shape, axes, block)
    return str(caught.value)


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        ((7, 4), ("rows", "columns"), "'rows' to divide over 2 devices of mesh axis tensor, got 7"),
        ((6, 4), ("all", None), "'all' to divide over 4 devices of mesh axis data x expert, got 6"),
        ((4, 4), ("rows", "rows"), "each mesh axis once, got 'tensor' twice for axes .*"),
        ((4, 4), ("all", "expert"), "each mesh axis once, got 'expert' twice for axes .*"),
        ((4, 4), ("rows", "width"), "an axis among rows, columns, expert, all; got 'width'"),
        ((4, 4), ("rows",), r"an axis for each of \(4, 4\), got \('rows',\)"),
    ],
)
def test_refusals(mesh, shape, axes, message):
    assert re.fullmatch(rf"some\.weight: expected (axis )?{message}", refusal(mesh, shape, axes))


def test_an_unknown_mesh_axis(mesh):
    rules = Rules({"rows": "model"})
    assert refusal(mesh, (4,), ("rows",), rules=rules) == (
        "some.weight: the rule for 'rows': expected a mesh axis among data, expert, tensor; "
        "got 'model'"
    )


@pytest.mark.parametrize(("rows", "whole"), [(192, False), (256, True), (320, False), (128, False)])
def test_blocks_stay_whole(mesh, rows, whole):
    if whole:
        RULES.sharding(mesh, "x", (rows, 576), ("rows", "columns"), (128, 128))
    else:
        assert refusal(mesh, (rows, 576), ("rows", "columns"), (128, 128)) == (
            "some.weight: expected whole blocks of 128 along axis 'rows', "
            f"got {rows} over 2 devices of mesh axis tensor"
        )


def test_the_table_cannot_be_changed():
    given = {"rows": "tensor"}
    rules = Rules(given)
    given["rows"] = "data"
    assert rules.table["rows"] == "tensor"
    with pytest.raises(TypeError):
        rules.table["rows"] = "data"  # pyright: ignore[reportIndexIssue]


def test_the_default_table_names_the_axes_of_make_mesh():
    assert set(DEFAULT_RULES.table.values()) == {*MESH_AXES, None}


# ---- the model's axes ----------------------------------------------------------------------------


@functools.cache
def a_layer_of_each_kind(name, quantization):
    """Returns a model with a published model's widths and one layer of each kind."""
    config = presets.get(name)
    config = dataclasses.replace(config, num_hidden_layers=config.first_k_dense_replace + 1)
    return abstract_model(config, dtype=jnp.bfloat16, quantization=quantization)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2", "deepseek-v2-lite", "kimi-k2"])
@pytest.mark.parametrize("quantization", [None, BlockQuantization(), INT8, INT4], ids=str)
def test_every_parameter_has_its_axes(name, quantization):
    """Each dimension has one axis, and each axis one size, except for heads and latent, which have
    several.
    """
    config = presets.get(name)
    model = a_layer_of_each_kind(name, quantization)
    sizes = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        axes, shape = logical_axes(path), variable.get_value().shape
        assert len(axes) == len(shape), path
        assert set(axes) <= set(DEFAULT_RULES.table), path
        if quantization is None:
            for axis, size in zip(axes, shape, strict=True):
                sizes.setdefault(axis, set()).add(size)
    if quantization is None:
        heads = sizes.pop("heads")
        assert all(size % config.num_attention_heads == 0 for size in heads)
        assert sizes.pop("latent") == {config.kv_lora_rank, config.latent_dim}
        assert {axis: size for axis, (size,) in sizes.items()} == {
            "vocab": config.vocab_size,
            "hidden": config.hidden_size,
            "ffn": config.intermediate_size,
            "expert": config.n_routed_experts,
            "expert_score": config.n_routed_experts,
            "expert_ffn": config.moe_intermediate_size,
            "shared_ffn": config.n_shared_experts * config.moe_intermediate_size,
            **({"q_rank": config.q_lora_rank} if config.q_lora_rank else {}),
            **({"joined_hidden": 2 * config.hidden_size} if len(model.mtp) else {}),
        }


@pytest.mark.parametrize("quantization", [None, BlockQuantization(), INT8, INT4], ids=str)
def test_scales_are_sharded_as_their_weights(quantization):
    mesh = make_mesh(expert=4, tensor=2)
    model = a_layer_of_each_kind("deepseek-v3", quantization)
    shardings = parameter_shardings(model, mesh, DEFAULT_RULES, quantization)
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    assert set(shardings) == set(flat)
    scales = [path for path in flat if "scale" in path[-1]]
    assert bool(scales) == (quantization is not None)
    for path in scales:
        spec, of_weight = shardings[path].spec, shardings[*path[:-1], "weight"].spec
        if quantization is INT8:
            assert spec == P(*of_weight[:-1], None)
        else:
            assert spec == of_weight
    down = shardings["layers", 3, "mlp", "experts", "down_proj", "weight"]
    assert down.spec == P("expert", None, "tensor")


@pytest.mark.parametrize("quantization", [BlockQuantization(), INT8, INT4], ids=str)
def test_eight_devices_split_no_block_of_deepseek_v3(quantization):
    model = a_layer_of_each_kind("deepseek-v3", quantization)
    parameter_shardings(model, make_mesh(tensor=8), DEFAULT_RULES, quantization)


def test_two_int4_of_a_byte_stay_together():
    """Two groups of an odd number of columns fill whole bytes."""
    assert _stored_block(INT4) == (1, 64)
    assert _stored_block(IntegerQuantization(4, 96)) == (1, 48)
    assert _stored_block(IntegerQuantization(4, 3)) == (1, 3)
    assert _stored_block(IntegerQuantization(4, None)) == (1, 1)
    assert _stored_block(IntegerQuantization(8, 32)) == (1, 32)


@pytest.mark.parametrize("block", [None, BlockQuantization()])
def test_the_first_parameter_that_does_not_fit_is_named(block):
    """V2-Lite's 10,944 columns are 1,368 per device, which is ten blocks and a partial one."""
    mesh = make_mesh(tensor=8)
    model = a_layer_of_each_kind("deepseek-v2-lite", block)
    if block is None:
        parameter_shardings(model, mesh, DEFAULT_RULES)
        return
    with pytest.raises(ValueError, match=r"^layers\.0\.mlp\.down_proj\.weight: expected whole"):
        parameter_shardings(model, mesh, DEFAULT_RULES, block)
