"""A model on eight devices: shardings, values, and the bytes that are read."""

import dataclasses
import functools
import itertools
import math
import re
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dsv3_jax
from dsv3_jax.checkpoint.arrays import LazyArray
from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.checkpoint.parameters import load_model
from dsv3_jax.checkpoint.reader import CheckpointReader
from dsv3_jax.checkpoint.tensor_table import published_tensor_names
from dsv3_jax.config import ModelConfig
from sharding import DEFAULT_RULES, Layout, Rules, make_mesh
from tests.checkpoint.values import no_array_made
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint
from tests.support.covering import covering, slow_except
from tests.support.running import forward

# Eight experts and eight heads, one layer of each kind; every width divides by eight.
CONFIG = tiny_config(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8)
MESHES = {
    "expert=8": {"expert": 8},
    "expert=4,tensor=2": {"expert": 4, "tensor": 2},
    "tensor=8": {"tensor": 8},
    "data=8": {"data": 8},
    "data=2,expert=2,tensor=2": {"data": 2, "expert": 2, "tensor": 2},
}
STORAGE = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16", "shards": 3},
    # Shards of eight devices split blocks of either axis, unless float8 is kept.
    "fp8": {"dtype": "fp8", "block": (24, 40), "shards": 3, "scales_in_other_shard": True},
}
BLOCK = (8, 8)  # two devices do not split them

# Keyed by the end of a path. The first match counts.
SPECS = {
    r"experts\.(gate|up)_proj\.\w+": P("expert", "tensor", None),
    r"experts\.down_proj\.\w+": P("expert", None, "tensor"),
    r"(embed_tokens|lm_head)\.weight": P("tensor", None),
    r"(gate_proj|up_proj|q_proj|q_b_proj|kv_b_proj)\.\w+": P("tensor", None),
    r"(down_proj|o_proj)\.\w+": P(None, "tensor"),
    r".*": P(),
}


def parameters(model):
    """Returns parameters by dotted path."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): variable.get_value() for path, variable in flat}


def expected_spec(path):
    fits = (spec for end, spec in SPECS.items() if re.search(rf"(?<!shared_){end}$", path))
    return next(fits)


def assert_spread(model, alone, mesh):
    """Expects the given shardings, and the same bytes as on one device."""
    assert_same(model, alone)
    for path, value in parameters(model).items():
        spec = expected_spec(path)
        if value.shape[-1] == 1:  # one scale per row
            spec = P(*spec[:-1], None)
        sharding = NamedSharding(mesh, spec)
        assert value.sharding.is_equivalent_to(sharding, value.ndim), path


def assert_same(model, other):
    """Expects the same parameters, bit for bit."""
    got, expected = parameters(model), parameters(other)
    assert set(got) == set(expected)
    for path, value in got.items():
        assert value.dtype == expected[path].dtype, path
        assert np.asarray(value).tobytes() == np.asarray(expected[path]).tobytes(), path


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns directories of CONFIG's checkpoints by storage. Each is written once."""

    @functools.cache
    def write(storage):
        directory = tmp_path_factory.mktemp("written") / "checkpoint"
        options = {**STORAGE, "fp8 kept": {"dtype": "fp8", "block": BLOCK}}[storage]
        write_checkpoint(directory, CONFIG, random_tensors(CONFIG), **options)
        return directory

    return write


@pytest.fixture(scope="module")
def on_one_device(written):
    """Returns CONFIG's models on one device. Each is loaded once."""

    @functools.cache
    def load(storage, **options):
        return dsv3_jax.load(written(storage), **options)[0]

    return load


@covering({"mesh": list(MESHES), "storage": list(STORAGE), "dtype": ["float32", "bfloat16"]})
def test_parameters(written, on_one_device, mesh, storage, dtype):
    mesh = make_mesh(**MESHES[mesh])
    model, _ = dsv3_jax.load(written(storage), dtype=dtype, mesh=mesh)
    assert_spread(model, on_one_device(storage, dtype=dtype), mesh)


@pytest.mark.parametrize("mesh", [name for name in MESHES if name != "tensor=8"])
def test_float8_parameters_and_their_scales(written, on_one_device, mesh):
    mesh = make_mesh(**MESHES[mesh])
    model, _ = dsv3_jax.load(written("fp8 kept"), quantization="fp8", mesh=mesh)
    alone = on_one_device("fp8 kept", quantization="fp8")
    assert sum("scale" in path for path in parameters(alone)) == 15 + 3 + 2 * 6
    assert_spread(model, alone, mesh)


def test_the_specs_above_are_of_every_kind(checkpoint):
    directory, _ = checkpoint(CONFIG)
    paths = parameters(dsv3_jax.load(directory)[0])
    assert {str(expected_spec(path)) for path in paths} == set(map(str, SPECS.values()))
    assert expected_spec("layers.1.mlp.shared_experts.up_proj.weight") == P("tensor", None)


def test_part_of_the_devices(checkpoint):
    directory, _ = checkpoint(CONFIG)
    mesh = make_mesh(expert=2, devices=jax.devices()[3:5])
    model, _ = dsv3_jax.load(directory, mesh=mesh)
    for value in parameters(model).values():
        assert value.devices() == set(jax.devices()[3:5])


def test_without_a_mesh_all_is_on_one_device(checkpoint):
    directory, _ = checkpoint(CONFIG)
    model, _ = dsv3_jax.load(directory)
    assert {d for v in parameters(model).values() for d in v.devices()} == {jax.devices()[0]}


def test_rules_of_ones_own(checkpoint):
    directory, _ = checkpoint(CONFIG)
    mesh = make_mesh(data=4, expert=2)
    rules = Rules({**DEFAULT_RULES.table, "expert": ("data", "expert"), "hidden": None})
    model, _ = dsv3_jax.load(directory, mesh=mesh, rules=rules)
    value = model.layers[1].mlp.experts.up_proj.weight.get_value()
    assert value.sharding.shard_shape(value.shape) == (1, 48, 64)


# ---- stores --------------------------------------------------------------------------------------

# Two devices split no block of 128 rows or columns.
STORED = tiny_config(
    num_hidden_layers=2,
    hidden_size=256,
    intermediate_size=256,
    kv_lora_rank=128,
    moe_intermediate_size=256,
    num_attention_heads=8,
    num_key_value_heads=8,
    q_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Returns a float8 checkpoint and its stores by form."""
    home = tmp_path_factory.mktemp("stores")
    write_checkpoint(home / "hf", STORED, random_tensors(STORED), dtype="fp8")
    for form in ("bf16", "fp8", "int8", "int4"):
        convert(home / "hf", home / form, form)
    return home


@pytest.fixture(scope="module")
def store_on_one_device(stores):
    """Returns the models of the stores on one device. Each is loaded once."""

    @functools.cache
    def load(form, **options):
        return dsv3_jax.load(stores / form, **options)[0]

    return load


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "form"),
    slow_except(
        [*itertools.product(["expert=8", "expert=4,tensor=2"], ["bf16", "fp8", "int8", "int4"])],
        quick=(0, 5, 7),
    ),
)
def test_a_store_dequantised(stores, store_on_one_device, mesh, form):
    mesh = make_mesh(**MESHES[mesh])
    model, _ = dsv3_jax.load(stores / form, dtype="bfloat16", mesh=mesh)
    alone = store_on_one_device(form, dtype="bfloat16")
    assert_spread(model, alone, mesh)
    if form in ("bf16", "fp8"):
        assert_same(alone, store_on_one_device("hf", dtype="bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "form"),
    slow_except(
        [*itertools.product(["expert=8", "expert=4,tensor=2"], ["fp8", "int8", "int4"])],
        quick=(1, 3),
    ),
)
def test_a_store_loads_in_its_own_form(stores, store_on_one_device, mesh, form):
    mesh = make_mesh(**MESHES[mesh])
    model, _ = dsv3_jax.load(stores / form, quantization=form, mesh=mesh)
    alone = store_on_one_device(form, quantization=form)
    assert_spread(model, alone, mesh)
    dtype = {"fp8": "float8_e4m3fn", "int8": "int8", "int4": "uint8"}[form]
    assert model.layers[1].mlp.experts.up_proj.weight.get_value().dtype == dtype
    if form == "fp8":
        assert_same(alone, store_on_one_device("hf", quantization="fp8"))


@pytest.mark.slow
@pytest.mark.parametrize("form", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_integer_weights_equal_their_dequantized_values(stores, tokens, form):
    """Compares dequantization at use, while loading, and over a mesh."""
    at_use = dsv3_jax.load(stores / form, quantization=form, mtp=False)[0]
    while_loading = dsv3_jax.load(stores / form, mtp=False)[0]
    for layer, dense in zip(at_use.layers, while_loading.layers, strict=True):
        assert (layer.self_attn.o_proj.dense("float32") == dense.self_attn.o_proj.weight[...]).all()
    expected = logits(while_loading, tokens)
    if form == "int8":
        assert_close(logits(at_use, tokens), expected)
    mesh = make_mesh(expert=4, tensor=2)
    spread = dsv3_jax.load(stores / form, quantization=form, mtp=False, mesh=mesh)[0]
    assert_close(logits(spread, tokens), expected)


@pytest.mark.parametrize(
    ("form", "asked", "form_of_store"),
    [
        ("bf16", "fp8", "no quantization_config"),
        ("bf16", "int8", "no quantization_config"),
        ("fp8", "int4", "float8 weights"),
        ("int8", "fp8", "int8 weights"),
        ("int4", "int8", "int4 weights"),
    ],
)
def test_a_store_of_another_form(stores, form, asked, form_of_store):
    pattern = rf"quantization='{asked}' keeps \w+ weights, and .* has {form_of_store}"
    assert_refused(stores / form, pattern, quantization=asked)


@pytest.mark.slow
def test_a_store_has_its_tokenizer(tmp_path):
    convert("demo", tmp_path / "store", "bf16")
    _, tokenizer = dsv3_jax.load(tmp_path / "store", mtp=False)
    assert tokenizer is not None
    assert tokenizer.encode("a b") == dsv3_jax.load("demo", mtp=False)[1].encode("a b")


def test_an_unfinished_store(stores, tmp_path):
    shutil.copytree(stores / "int8", tmp_path / "store")
    (tmp_path / "store" / "manifest.json").rename(tmp_path / "store" / "journal.jsonl")
    assert_refused(tmp_path / "store", r".*an unfinished conversion; .*")


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_store_that_lacks_a_chunk(stores, tmp_path, quantization):
    shutil.copytree(stores / "int8", tmp_path / "store")
    array = tmp_path / "store" / "weights" / "layers.1.mlp.experts.up_proj.weight"
    chunks = sorted(path for path in array.rglob("*") if path.is_file() and path.parent != array)
    chunks[-1].unlink()
    with pytest.raises(ValueError, match=r"\A.*layers\.1\.mlp\.experts\.up_proj\.weight: .*\Z"):
        dsv3_jax.load(tmp_path / "store", quantization=quantization)


# ---- what is read --------------------------------------------------------------------------------


class Watched:
    """A tensor that records which parts are read."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.parts = []

    def __getitem__(self, index):
        part = self.tensor[index]
        self.parts.append(part.shape)
        return part

    @property
    def read(self):
        return sum(map(math.prod, self.parts))


@pytest.mark.parametrize("quantization", ["float32", "fp8 dequantised", "fp8 kept"])
@pytest.mark.parametrize("mesh", ["expert=8", "expert=4,tensor=2", "data=2,expert=2,tensor=2"])
def test_every_part_is_read_once_and_by_itself(checkpoint, mesh, quantization):
    """No read exceeds a device's shard, and together they cover each tensor once."""
    storage = "float32" if quantization == "float32" else "fp8"
    directory, _ = checkpoint(
        {**CONFIG, "num_nextn_predict_layers": 0},
        dtype=storage,
        **({"block": BLOCK} if storage == "fp8" else {}),
    )
    config = ModelConfig.from_hf(directory)
    mesh = make_mesh(**MESHES[mesh])
    watched = {name: Watched(tensor) for name, tensor in CheckpointReader(directory).items()}
    assert all(isinstance(tensor, LazyArray) for tensor in watched.values())
    model = load_model(
        config,
        watched,
        dtype="float32",
        quantization=config.quantization if quantization == "fp8 kept" else None,
        layout=Layout(mesh),
    )
    shares = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = variable.get_value()
        names, stacked = published_tensor_names(config, path)
        share = value.sharding.shard_shape(value.shape)[stacked:]
        shares |= dict.fromkeys(names, share)
    for name, tensor in watched.items():
        assert tensor.read == math.prod(tensor.shape), name
        if name in shares:
            assert set(tensor.parts) == {shares[name]}, name


def test_without_a_mesh_each_expert_is_read_by_itself(checkpoint):
    directory, _ = checkpoint({**CONFIG, "num_nextn_predict_layers": 0}, dtype="fp8")
    config = ModelConfig.from_hf(directory)
    watched = {name: Watched(tensor) for name, tensor in CheckpointReader(directory).items()}
    load_model(config, watched, dtype="float32", quantization=None)
    assert all(tensor.parts == [tensor.shape] for tensor in watched.values())


def test_matrices_are_read_in_pieces(checkpoint, monkeypatch):
    """Pieces have ten rows, so that their borders split blocks of 24."""
    directory, _ = checkpoint(CONFIG, dtype="fp8", block=(24, 40))
    alone, _ = dsv3_jax.load(directory)

    def few(shape):
        return (slice(first, min(first + 10, shape[0])) for first in range(0, shape[0], 10))

    monkeypatch.setattr("dsv3_jax.checkpoint.parameters.pieces", few)
    mesh = make_mesh(expert=4, tensor=2)
    assert_spread(dsv3_jax.load(directory, mesh=mesh)[0], alone, mesh)
    assert_same(dsv3_jax.load(directory)[0], alone)


# ---- the same function ---------------------------------------------------------------------------


def logits(model, tokens):
    return np.asarray(forward(model, tokens)[0])


def assert_close(got, expected):
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(0, 160, (8, 7)).astype(np.int32)


ALL_AXES = "data=2,expert=2,tensor=2"


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(name, marks=() if name in ("expert=8", ALL_AXES) else pytest.mark.slow)
        for name in MESHES
    ],
)
def test_logits(written, on_one_device, tokens, mesh):
    mesh = make_mesh(**MESHES[mesh])
    expected = logits(on_one_device("float32", mtp=False), tokens)
    assert_close(
        logits(dsv3_jax.load(written("float32"), mtp=False, mesh=mesh)[0], tokens), expected
    )


# test_store_logits.py has those of the demo.
@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [pytest.param("expert=8", marks=pytest.mark.slow), "expert=4,tensor=2"]
)
def test_logits_of_float8(written, on_one_device, tokens, mesh):
    options = {"mtp": False, "quantization": "fp8"}
    mesh = make_mesh(**MESHES[mesh])
    expected = logits(on_one_device("fp8 kept", **options), tokens)
    model, _ = dsv3_jax.load(written("fp8 kept"), mesh=mesh, **options)
    assert_close(logits(model, tokens), expected)


# ---- refusals ------------------------------------------------------------------------------------


def assert_refused(directory, pattern, **options):
    with no_array_made(), pytest.raises(ValueError) as caught:  # noqa: PT011
        dsv3_jax.load(directory, **options)
    assert re.fullmatch(pattern, str(caught.value))


@pytest.mark.parametrize(
    ("change", "sizes", "pattern"),
    [
        ({"n_routed_experts": 12}, {"expert": 8}, r"layers\.1\.\S+: .*'expert' .* 8 .*, got 12"),
        ({"vocab_size": 161}, {"tensor": 8}, r"embed_tokens\.weight: .*'vocab' .*, got 161"),
        ({"intermediate_size": 92}, {"tensor": 8}, r"layers\.0\.\S+: .*'ffn' .*, got 92"),
    ],
)
def test_dimensions_that_do_not_divide(checkpoint, change, sizes, pattern):
    directory, _ = checkpoint({**CONFIG, **change})
    assert_refused(directory, pattern, mesh=make_mesh(**sizes))


def test_a_block_over_a_border(checkpoint):
    four = {"num_attention_heads": 4, "num_key_value_heads": 4}
    directory, _ = checkpoint({**CONFIG, **four}, dtype="fp8", block=(16, 16))
    mesh = make_mesh(expert=4, tensor=2)
    expected = "expected whole blocks of 16 along axis 'heads', got 112 over 2 devices .*"
    pattern = rf"layers\.0\.self_attn\.kv_b_proj\.weight: {expected}"
    assert_refused(directory, pattern, mesh=mesh, quantization="fp8")
    dsv3_jax.load(directory, mesh=mesh)


def test_a_mesh_axis_for_two_dimensions(checkpoint):
    directory, _ = checkpoint(CONFIG)
    rules = Rules({**DEFAULT_RULES.table, "hidden": "tensor"})
    pattern = r"embed_tokens\.weight: expected each mesh axis once, got 'tensor' twice .*"
    assert_refused(directory, pattern, mesh=make_mesh(tensor=8), rules=rules)


def test_rules_without_an_axis_of_the_model(checkpoint):
    directory, _ = checkpoint(CONFIG)
    pattern = r"embed_tokens\.weight: expected an axis among vocab; got 'hidden'"
    assert_refused(directory, pattern, mesh=make_mesh(tensor=8), rules=Rules({"vocab": None}))


def test_rules_without_a_mesh(checkpoint):
    directory, _ = checkpoint(CONFIG)
    assert_refused(
        directory, "rules: expected a mesh that they apply to, got None", rules=DEFAULT_RULES
    )


def test_a_damaged_scale_is_named_on_a_mesh(checkpoint):
    directory, _ = checkpoint(CONFIG, dtype="fp8", block=BLOCK)
    tensors = dict(CheckpointReader(directory))
    name = "model.layers.1.mlp.experts.5.up_proj.weight_scale_inv"
    broken = tensors[name][...]
    broken[-1, -1] = np.nan
    config = dataclasses.replace(ModelConfig.from_hf(directory), num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}: expected scales that are finite"):
        load_model(
            config,
            {**tensors, name: broken},
            dtype="float32",
            quantization=None,
            layout=Layout(make_mesh(expert=8)),
        )
