"""Loaded models have the values of their files, in every storage format."""

import builtins
import io
import json
import os

import ml_dtypes
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.checkpoint.parameters import published_tensors
from dsv3_jax.checkpoint.reader import CheckpointReader
from dsv3_jax.checkpoint.tensor_table import UNUSED_SUFFIXES
from tests.checkpoint.files import CONFIG, INDEX, SINGLE, Stored, edit, edit_json, read_directory
from tests.checkpoint.values import assert_holds, loaded, same_bytes, small_config
from tests.support.checkpoints import BIAS, is_fp8, tensor_shapes

SCALE = "_scale_inv"

# As 576 rows are four and a half blocks of 128: 160 rows of kv_a_proj_with_mqa are one and a
# quarter, 144 columns one and an eighth, and the dense MLP is as odd as V2-Lite's.
WIDE = small_config(
    hidden_size=144,
    intermediate_size=300,
    kv_lora_rank=152,
    moe_intermediate_size=132,
)
V2 = small_config(
    architectures=["DeepseekV2ForCausalLM"],
    model_type="deepseek_v2",
    n_group=1,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_nextn_predict_layers=0,
    q_lora_rank=None,
    routed_scaling_factor=1.0,
    scoring_func="softmax",
    topk_group=1,
    topk_method="greedy",
)
CONFIGS = {
    "small": small_config(),
    "wide": WIDE,
    "v2": V2,
    "two-mtp-layers": small_config(num_nextn_predict_layers=2),
    "no-shared-expert": small_config(n_shared_experts=0),
    "dense": small_config(first_k_dense_replace=2, num_nextn_predict_layers=0),
}
STORAGE = {
    "float32": {"dtype": "float32"},
    "float32-3-shards": {"dtype": "float32", "shards": 3},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-3-shards": {"dtype": "bfloat16", "shards": 3},
    "fp8": {"dtype": "fp8"},
    "fp8-3-shards": {"dtype": "fp8", "shards": 3},
    "fp8-scales-elsewhere": {"dtype": "fp8", "shards": 3, "scales_in_other_shard": True},
    "fp8-ue8m0": {"dtype": "fp8", "scale_fmt": "ue8m0"},
    "fp8-small-blocks": {"dtype": "fp8", "block": (24, 40)},
}
FP8 = [name for name in STORAGE if name.startswith("fp8")]


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("config", ["small", "wide"])
def test_values(checkpoint, config, storage):
    directory, expected = checkpoint(CONFIGS[config], **STORAGE[storage])
    assert set(expected) == set(tensor_shapes(CONFIGS[config]))
    assert_holds(loaded(directory), expected)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["bfloat16-3-shards", "fp8-scales-elsewhere"])
@pytest.mark.parametrize("config", ["v2", "two-mtp-layers", "no-shared-expert", "dense"])
def test_values_of_relatives(checkpoint, config, storage):
    directory, expected = checkpoint(CONFIGS[config], **STORAGE[storage])
    assert_holds(loaded(directory), expected)


def test_the_blocks_above_are_partial_and_several(checkpoint):
    directory, _ = checkpoint(WIDE, dtype="fp8")
    stored = read_directory(directory)
    kv_a = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert stored[kv_a].shape == (160, 144)
    assert stored[kv_a + SCALE].shape == (2, 2)
    scales = np.concatenate([t.array.ravel() for n, t in stored.items() if n.endswith(SCALE)])
    assert len(np.unique(scales)) > len(scales) / 2


def test_scales_above_are_elsewhere(checkpoint):
    directory, _ = checkpoint(**STORAGE["fp8-scales-elsewhere"])
    files = json.loads((directory / INDEX).read_text())["weight_map"]
    weights = [name for name in files if name + SCALE in files]
    assert len(weights) == sum(map(is_fp8, files))
    assert all(files[name] != files[name + SCALE] for name in weights)


@pytest.mark.parametrize("config", ["small", "v2"])
def test_every_tensor_is_at_the_module_of_its_name(checkpoint, config):
    """Reads parameters through attributes, because the other tests use the package's own names."""
    directory, expected = checkpoint(CONFIGS[config])
    model, _ = dsv3_jax.load(directory)
    values = {name: module_weight(model, name) for name in expected if not is_copy(name)}
    for name, value in values.items():
        np.testing.assert_array_equal(np.asarray(value, np.float64), expected[name], name)
    of_experts = [name for name in values if ".experts." in name]
    assert len(of_experts) in (2 * 4 * 3, 4 * 3)


def is_copy(name):
    return "layers" in name and name.endswith(("embed_tokens.weight", "shared_head.head.weight"))


def module_weight(model, name):
    """Follows the dots of a published name through the model's attributes."""
    node, expert = model, None
    parts = name.removeprefix("model.").split(".")
    if parts[0] == "layers" and int(parts[1]) >= len(model.layers):
        parts[:2] = ["mtp", str(int(parts[1]) - len(model.layers))]
    for before, part in zip(["", *parts], parts, strict=False):
        if before == "experts":
            expert = int(part)
        else:
            node = node[int(part)] if part.isdigit() else getattr(node, part)
    return node[...] if expert is None else node[expert]


# ---- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_dtype_rounds_the_exact_value_once_and_spares_the_bias(checkpoint, storage, dtype):
    directory, expected = checkpoint(WIDE, **STORAGE[storage])
    bias = next(value for name, value in expected.items() if name.endswith(BIAS))
    assert (bias != bias.astype(ml_dtypes.bfloat16)).any()
    assert_holds(loaded(directory, dtype=dtype), expected, dtype)


# 5/4 times these float32 scales is next to the midpoint of two bfloat16 numbers, above and
# below, and nearer to it than float32 can tell: by way of float32 it would be rounded to even.
CLOSE_TO_A_TIE = ((1 + 2**-8, 1 + 2**-7), (1 + 3 * 2**-8, 1 + 2**-7))


def test_a_product_is_not_rounded_to_float32_first(checkpoint):
    directory, _ = checkpoint(dtype="fp8")
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    for tie, nearest in CLOSE_TO_A_TIE:
        scale = np.float32(tie / 1.25)
        exact = np.float64(1.25) * np.float64(scale)
        assert np.float32(exact) == tie
        assert (exact > tie) == (nearest > tie)
        assert np.float32(exact).astype(ml_dtypes.bfloat16) != nearest

        def put(tensors, scale=scale):
            shape = tensors[name].shape
            tensors[name] = Stored.of(np.full(shape, 1.25, ml_dtypes.float8_e4m3fn))
            tensors[name + SCALE] = Stored.of(np.full((1, 1), scale, np.float32))

        edit(directory / SINGLE, put)
        assert (loaded(directory, dtype="bfloat16")[name] == nearest).all()


def test_the_default_on_a_cpu_is_float32(checkpoint):
    directory, _ = checkpoint(dtype="bfloat16")
    assert dsv3_jax.load(directory)[0].dtype == np.float32
    assert dsv3_jax.load(directory, dtype=ml_dtypes.bfloat16)[0].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", np.float64, "half a byte"])
def test_other_dtypes_are_refused(checkpoint, dtype):
    directory, _ = checkpoint(dtype="fp8")
    with pytest.raises(ValueError, match=r"^dtype: expected one of bfloat16, .*; got .*$"):
        dsv3_jax.load(directory, dtype=dtype)


# ---- float8 kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "dtype"), [("fp8", "bfloat16"), *((storage, "float32") for storage in FP8)]
)
def test_fp8_keeps_the_bytes(checkpoint, storage, dtype):
    directory, expected = checkpoint(WIDE, **STORAGE[storage])
    stored = read_directory(directory)
    got = loaded(directory, quantization="fp8", dtype=dtype)
    assert set(got) == set(stored)
    num_fp8 = 0
    for name, tensor in stored.items():
        if is_fp8(name) or name.endswith((SCALE, BIAS)):
            assert got[name].dtype == tensor.array.dtype, name
            assert got[name].tobytes() == tensor.data, name
            num_fp8 += is_fp8(name)
        else:
            assert got[name].dtype == dtype, name
            np.testing.assert_array_equal(got[name].astype(np.float64), expected[name], name)
    assert num_fp8 == sum(map(is_fp8, expected))


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_fp8_needs_a_float8_checkpoint(checkpoint, storage):
    directory, _ = checkpoint(**STORAGE[storage])
    with pytest.raises(ValueError, match=r"^quantization='fp8' .* has no quantization_config$"):
        dsv3_jax.load(directory, quantization="fp8")


def test_fp8_needs_float8_tensors(checkpoint):
    """Some conversions leave a config for float8 next to bfloat16 files."""
    directory, _ = checkpoint(dtype="bfloat16")
    promise = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_json(directory / CONFIG, lambda config: config.update(quantization_config=promise))
    with pytest.raises(ValueError, match=r"^checkpoint: missing scale model\..* and \d+ more$"):
        dsv3_jax.load(directory, quantization="fp8")


@pytest.mark.parametrize("name", ["int5", "bf16", "", "FP8", 8, ["fp8"]])
def test_other_quantizations_are_refused(checkpoint, name):
    directory, _ = checkpoint(dtype="fp8")
    with pytest.raises(ValueError, match=r"^quantization: expected 'fp8', 'int8', 'int4' or None"):
        dsv3_jax.load(directory, quantization=name)


@pytest.mark.parametrize("storage", ["bfloat16", "fp8"])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integer_weights_load_only_from_integer_stores(checkpoint, storage, name):
    directory, _ = checkpoint(dtype=storage)
    with pytest.raises(ValueError, match=rf"^quantization='{name}' keeps {name} weights, and .*$"):
        dsv3_jax.load(directory, quantization=name)


# ---- files others write --------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_scales_stored_as_exponents(checkpoint, quantization):
    """F8_E8M0 stores a power of two in one byte. The values are those of float32 scales."""
    directory, expected = checkpoint(WIDE, dtype="fp8", scale_fmt="ue8m0")
    before = loaded(directory, quantization=quantization)

    def narrow(tensors):
        for name, tensor in tensors.items():
            if name.endswith(SCALE):
                tensors[name] = Stored.of(tensor.array.astype(ml_dtypes.float8_e8m0fnu))
                assert (tensors[name].array.astype(np.float32) == tensor.array).all()

    edit(directory / SINGLE, narrow)
    stored = read_directory(directory)
    assert {t.dtype for n, t in stored.items() if n.endswith(SCALE)} == {"F8_E8M0"}
    got = loaded(directory, quantization=quantization)
    if quantization is None:
        assert_holds(got, expected)
    assert same_bytes(got, before)


def test_scales_stored_as_bfloat16(checkpoint):
    directory, expected = checkpoint(dtype="fp8", scale_fmt="ue8m0")

    def narrow(tensors):
        for name, tensor in tensors.items():
            if name.endswith(SCALE):
                tensors[name] = Stored.of(tensor.array.astype(ml_dtypes.bfloat16))

    edit(directory / SINGLE, narrow)
    assert_holds(loaded(directory), expected)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_unused_tensors_are_passed_over_and_may_be_odd(checkpoint, quantization):
    """The tensor may have any dtype and shape. This one also misaligns all tensors after it."""
    directory, _ = checkpoint(dtype="fp8")
    before = loaded(directory, quantization=quantization)

    def prepend(tensors):
        rest = dict(tensors)
        tensors.clear()
        for suffix in UNUSED_SUFFIXES:
            tensors[f"model.layers.0.self_attn{suffix}"] = Stored("U8", (3,), b"abc")
        tensors |= rest

    edit(directory / SINGLE, prepend)
    assert same_bytes(loaded(directory, quantization=quantization), before)


def test_an_index_goes_before_a_single_file(checkpoint):
    directory, expected = checkpoint(shards=3)
    (directory / SINGLE).write_bytes(b"left over")
    assert_holds(loaded(directory), expected)


# ---- files stay as they are ----------------------------------------------------------------------


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_files_are_only_read(checkpoint, monkeypatch, quantization):
    directory, _ = checkpoint(dtype="fp8", shards=3)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in directory.iterdir()}
    modes = {}
    plain_open = open

    def watched(file, mode="r", *args, **kwargs):
        if isinstance(file, (str, os.PathLike)):
            modes.setdefault(os.fspath(file), set()).add(mode.replace("b", ""))
        return plain_open(file, mode, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", watched)
    monkeypatch.setattr(io, "open", watched)
    model, _ = dsv3_jax.load(directory, quantization=quantization)
    monkeypatch.undo()
    assert all(modes[os.fspath(path)] == {"r"} for path in before)
    del model
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in directory.iterdir()} == before


def test_a_reader_returns_the_values_of_the_files(checkpoint):
    directory, _ = checkpoint(dtype="fp8", shards=3)
    reader = CheckpointReader(directory)
    stored = read_directory(directory)
    assert set(reader) == set(stored)
    assert len(reader) == len(stored)
    for name, tensor in reader.items():
        assert (tensor.shape, tensor[...].tobytes()) == (stored[name].shape, stored[name].data)
        assert tensor[1:3].tobytes() == stored[name].array[1:3].tobytes()
        assert tensor[..., :1].tobytes() == stored[name].array[..., :1].tobytes()
        tensor[...].fill(0)
        assert tensor[...].tobytes() == stored[name].data


def test_a_model_does_not_change_with_its_files(checkpoint):
    """The files may be overwritten after loading, because nothing maps them."""
    directory, _ = checkpoint(dtype="fp8")
    model, _ = dsv3_jax.load(directory, quantization="fp8")
    before = loaded(directory, quantization="fp8")
    path = directory / SINGLE
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert same_bytes(published_tensors(model), before)
