"""Damaged, incomplete and foreign checkpoints are refused in one line before anything is loaded."""

import json
import re

import jax
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.checkpoint.tensor_table import UNUSED_SUFFIXES
from sharding import make_mesh
from tests.checkpoint import files
from tests.checkpoint.files import CONFIG, INDEX, SINGLE, Stored
from tests.checkpoint.values import assert_holds, loaded, no_array_made, small_config

SECOND = "model-00002-of-00003.safetensors"
NORM = "model.layers.0.input_layernorm.weight"
KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"  # [40, 64]
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def assert_refused(directory, pattern, **options):
    """Expects a one-line ValueError that `pattern` matches completely, and no loaded weight."""
    with no_array_made(), pytest.raises(ValueError) as caught:  # noqa: PT011
        dsv3_jax.load(directory, **options)
    # A dot of the pattern does not match a line break.
    assert re.fullmatch(pattern, str(caught.value))


def test_the_count_of_arrays_sees_a_load(checkpoint):
    """Shows that `no_array_made`, on which the refusals rely, notices a load."""
    directory, _ = checkpoint()
    loaded_models = []
    with pytest.raises(AssertionError, match=r"^\d\d+ arrays"), no_array_made():
        loaded_models.append(dsv3_jax.load(directory))


# ---- values that select --------------------------------------------------------------------------


INDEXER = "model.layers.1.self_attn.indexer."


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name",
    [
        BIAS,
        "model.layers.2.mlp.gate.e_score_correction_bias",  # of the MTP layer
        "model.layers.1.mlp.gate.weight",
        *(INDEXER + each for each in ("wq_b.weight", "wk.weight", "weights_proj.weight")),
        *(INDEXER + each for each in ("k_norm.weight", "k_norm.bias")),
    ],
)
def test_a_tensor_that_selects_has_finite_values(checkpoint, name, value):
    """Logits would stay finite, although other experts or keys are selected."""
    sparse = {"model_type": "deepseek_v32", "index_topk": 16}
    directory, _ = checkpoint(small_config(**sparse, index_n_heads=8, index_head_dim=16))

    def damage(tensors):
        array = tensors[name].array.copy()
        array.reshape(-1)[array.size // 2] = value
        tensors[name] = Stored.of(array)

    files.edit(directory / SINGLE, damage)
    message = rf"^{re.escape(name)}: expected finite values, got {value}$"
    with pytest.raises(ValueError, match=message):
        dsv3_jax.load(directory)


@pytest.mark.parametrize("axes", [None, {"expert": 4}])
@pytest.mark.parametrize("name", [BIAS, INDEXER + "k_norm.bias", INDEXER + "wk.weight"])
def test_a_store_that_selects_by_nan(checkpoint, tmp_path, monkeypatch, name, axes):
    """A conversion refuses such values, so that they come from another program or from damage."""
    sparse = {"model_type": "deepseek_v32", "index_topk": 16, "dtype": "float32"}
    directory, _ = checkpoint(small_config(**sparse, index_n_heads=8, index_head_dim=16))
    monkeypatch.setattr("dsv3_jax.checkpoint.conversion_plan.check_finite", lambda *_: None)

    def damage(tensors):
        array = tensors[name].array.copy()
        array.reshape(-1)[-1] = np.nan
        tensors[name] = Stored.of(array)

    files.edit(directory / SINGLE, damage)
    convert(directory, tmp_path / "store", "bf16")
    mesh = None if axes is None else make_mesh(**axes, devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}: expected finite values, got nan$"):
        dsv3_jax.load(tmp_path / "store", mesh=mesh)


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("damage", ["value", "scale", "product"])
def test_a_float8_indexer_has_finite_values(checkpoint, damage, quantization):
    sparse = {"model_type": "deepseek_v32", "index_topk": 16}
    config = small_config(**sparse, index_n_heads=8, index_head_dim=16)
    directory, _ = checkpoint(config, dtype="fp8")
    name = INDEXER + "wk.weight"

    def change(tensors):
        changed = name if damage == "value" else f"{name}_scale_inv"
        array = tensors[changed].array.copy()
        array.reshape(-1)[0] = {"value": np.nan, "scale": np.inf, "product": 3e38}[damage]
        tensors[changed] = Stored.of(array)

    files.edit(directory / SINGLE, change)
    expected = "scales that are finite" if damage == "scale" else "finite values, got"
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}(_scale_inv)?: expected {expected}"):
        dsv3_jax.load(directory, quantization=quantization)


# ---- one safetensors file ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "length",
    [0, 1, 7, 8, 9, "half the header", "the header", "one value", "half", "all but a byte"],
)
def test_truncated(checkpoint, length):
    directory, _ = checkpoint()
    path = directory / SINGLE
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    lengths = {
        "half the header": header // 2,
        "the header": header,
        "one value": header + 4,
        "half": len(content) // 2,
        "all but a byte": len(content) - 1,
    }
    length = lengths.get(length, length)
    path.write_bytes(content[:length])
    kind = "truncated" if length >= header else "truncated or not a safetensors file"
    sizes = f": expected {len(content)} bytes, got {length}"
    end = sizes if length >= header else rf" \({length} bytes\)"
    assert_refused(directory, re.escape(SINGLE) + f": {kind}{end}")


@pytest.mark.parametrize("garbage", [b"\0", b"\n", b"more than one byte" * 100])
def test_trailing_garbage(checkpoint, garbage):
    directory, _ = checkpoint()
    path = directory / SINGLE
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + garbage)
    expected = f"damaged: expected {size} bytes, got {size + len(garbage)}"
    assert_refused(directory, re.escape(SINGLE) + f": {expected}")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001])
def test_a_header_longer_than_the_file(checkpoint, length):
    directory, _ = checkpoint()
    path = directory / SINGLE
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    assert_refused(directory, r"model\.safetensors: truncated or not a safetensors file \(.*\)")


@pytest.mark.parametrize(
    "header", [b"", b"{", b"not JSON", b'{"a": }', b"\xff\xfe{}", b"[" * 200_000, b'"' * 7]
)
def test_a_header_that_is_not_json(checkpoint, header):
    directory, _ = checkpoint()
    _, data = files.split(directory / SINGLE)
    files.join(directory / SINGLE, header, data)
    assert_refused(directory, r"model\.safetensors: its safetensors header is not valid JSON")


@pytest.mark.parametrize("header", [[], [1, 2], "text", 3, None])
def test_a_header_that_is_not_an_object(checkpoint, header):
    directory, _ = checkpoint()
    files.join(directory / SINGLE, header, b"")
    assert_refused(directory, r"model\.safetensors: its safetensors header is not a JSON object")


@pytest.mark.parametrize(
    "entry",
    [
        None,
        7,
        [],
        {},
        {"dtype": "F32", "shape": [64]},
        {"dtype": "F32", "data_offsets": [0, 256]},
        {"shape": [64], "data_offsets": [0, 256]},
        {"dtype": ["F32"], "shape": [64], "data_offsets": [0, 256]},
        {"dtype": "F32", "shape": 64, "data_offsets": [0, 256]},
        {"dtype": "F32", "shape": ["64"], "data_offsets": [0, 256]},
        {"dtype": "F32", "shape": [64.0], "data_offsets": [0, 256]},
        {"dtype": "F32", "shape": [-8, -8], "data_offsets": [0, 256]},
        {"dtype": "F32", "shape": [64], "data_offsets": [256]},
        {"dtype": "F32", "shape": [64], "data_offsets": [0, 256, 512]},
        {"dtype": "F32", "shape": [64], "data_offsets": [0.0, 256.0]},
        {"dtype": "F32", "shape": [64], "data_offsets": [-256, 0]},
        {"dtype": "F32", "shape": [64], "data_offsets": [False, 256]},
        {"dtype": "F32", "shape": [64], "data_offsets": "01"},
    ],
)
def test_an_entry_that_is_none(checkpoint, entry):
    directory, _ = checkpoint()
    files.edit_header(directory / SINGLE, lambda header: header.update({NORM: entry}))
    expected = "expected dtype, shape and two data_offsets, got .*"
    assert_refused(directory, re.escape(f"{SINGLE}: {NORM}: ") + expected)


@pytest.mark.parametrize("dtype", ["F4", "F8_E5M2", "BOOL", "", "f32", "C64"])
def test_an_unknown_dtype(checkpoint, dtype):
    directory, _ = checkpoint()
    files.edit_header(directory / SINGLE, lambda header: header[NORM].update(dtype=dtype))
    expected = f"expected a dtype among F64, .*; got {dtype!r}"
    assert_refused(directory, re.escape(f"{SINGLE}: {NORM}: ") + expected)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [63]},
        {"shape": [64, 2]},
        {"shape": [0]},
        {"shape": []},
        {"shape": [2**40, 2**40]},
        {"dtype": "BF16"},
        {"dtype": "F64"},
    ],
)
def test_a_shape_that_its_bytes_do_not_fill(checkpoint, change):
    directory, _ = checkpoint()
    files.edit_header(directory / SINGLE, lambda header: header[NORM].update(change))
    expected = r"256 bytes do not hold \w+ \[.*\]"
    assert_refused(directory, re.escape(f"{SINGLE}: {NORM}: ") + expected)


def swap_bounds(header):
    header[NORM]["data_offsets"].reverse()


def shift(by):
    def change(header):
        header[NORM]["data_offsets"] = [offset + by for offset in header[NORM]["data_offsets"]]

    return change


def share(header):
    """Gives two tensors of the same size the same offsets, so that some bytes belong to none."""
    other = "model.layers.0.post_attention_layernorm.weight"
    header[NORM]["data_offsets"] = header[other]["data_offsets"]


def leave_out(header):
    del header[NORM]


def place_behind_the_end(header):
    end = max(entry["data_offsets"][1] for entry in header.values())
    header[NORM]["data_offsets"] = [end, end + 256]


@pytest.mark.parametrize(
    "change",
    [
        swap_bounds,
        shift(-4),
        shift(4),
        shift(1),
        shift(2**50),
        share,
        leave_out,
        place_behind_the_end,
    ],
)
def test_wrong_offsets(checkpoint, change):
    directory, _ = checkpoint()
    files.edit_header(directory / SINGLE, change)
    wrong = "expected data_offsets that begin at [0-9]+, got [0-9]+|-256 bytes do not hold .*"
    assert_refused(directory, rf"model\.safetensors: \S+: ({wrong})")


def test_a_gap_before_the_first_tensor(checkpoint):
    directory, _ = checkpoint()
    header, data = files.split(directory / SINGLE)
    for entry in header.values():
        entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]
    files.join(directory / SINGLE, header, bytes(8) + data)
    assert_refused(directory, r"model\.safetensors: \S+: expected .* begin at 0, got 8")


def test_tensors_that_overlap(checkpoint):
    """The offsets of each tensor fit its shape, and the file has the length that they imply."""
    directory, _ = checkpoint()
    header, data = files.split(directory / SINGLE)
    first = min(entry["data_offsets"][1] for entry in header.values())
    for entry in header.values():
        if entry["data_offsets"][0] >= first:
            entry["data_offsets"] = [offset - 8 for offset in entry["data_offsets"]]
    files.join(directory / SINGLE, header, data[:-8])
    assert_refused(directory, rf"model\.safetensors: \S+: .* begin at {first}, got {first - 8}")


def test_a_file_without_tensors(checkpoint):
    directory, _ = checkpoint()
    files.join(directory / SINGLE, {}, b"")
    assert_refused(
        directory, r"checkpoint: missing tensor model\.embed_tokens\.weight and \d+ more"
    )


def test_the_order_in_the_header_is_free(checkpoint):
    directory, expected = checkpoint()
    header, data = files.split(directory / SINGLE)
    files.join(directory / SINGLE, dict(sorted(header.items(), reverse=True)), data)
    assert_holds(loaded(directory), expected)


# ---- the index and its shards --------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"[]", b"null", b"[" * 200_000, b'{"metadata": {"total_size": 3}}']
    + [b'{"weight_map": %s}' % value for value in (b"[]", b"null", b'"text"', b"3")],
)
def test_an_index_that_is_none(checkpoint, content):
    directory, _ = checkpoint(shards=3)
    (directory / INDEX).write_bytes(content)
    assert_refused(directory, re.escape(f"{INDEX}: expected JSON with a weight_map"))


@pytest.mark.parametrize("shard", [3, None, [SECOND], {}, True, "", "..", "pytorch_model.bin"])
def test_a_shard_that_is_no_safetensors_file(checkpoint, shard):
    directory, _ = checkpoint(shards=3)
    files.edit_json(directory / INDEX, lambda index: index["weight_map"].update({NORM: shard}))
    got = re.escape(repr(shard))
    assert_refused(
        directory,
        re.escape(f"{INDEX}: {NORM}: ")
        + f"expected a plain file name ending in .safetensors, got {got}",
    )


@pytest.mark.parametrize("where", ["../elsewhere", "sub/../../elsewhere", "{absolute}"])
def test_a_shard_outside_of_the_directory(checkpoint, where):
    directory, _ = checkpoint(shards=3)
    outside = directory.with_name("elsewhere")
    outside.mkdir()
    (directory / "sub").mkdir()
    (directory / SECOND).rename(outside / SECOND)
    shard = f"{where.format(absolute=outside)}/{SECOND}"
    assert (directory / shard).is_file()

    def move(index):
        moved = [name for name, file in index["weight_map"].items() if file == SECOND]
        index["weight_map"] |= dict.fromkeys(moved, shard)

    files.edit_json(directory / INDEX, move)
    assert_refused(
        directory,
        rf"{INDEX}: \S+: expected a plain file name ending in .safetensors, "
        f"got {re.escape(repr(shard))}",
    )


def test_a_missing_shard(checkpoint):
    directory, _ = checkpoint(shards=3)
    (directory / SECOND).unlink()
    names = f"{INDEX} names 3 shards; missing: {SECOND}"
    assert_refused(directory, re.escape(f"{directory}: {names}"))
    (directory / "model-00001-of-00003.safetensors").unlink()
    names = f"{INDEX} names 3 shards; missing: model-00001-of-00003.safetensors and 1 more"
    assert_refused(directory, re.escape(f"{directory}: {names}"))


def test_a_directory_in_place_of_a_shard(checkpoint):
    directory, _ = checkpoint(shards=3)
    (directory / SECOND).unlink()
    (directory / SECOND).mkdir()
    assert_refused(directory, rf".* names 3 shards; missing: {SECOND}")


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 20, -1])
def test_a_truncated_shard(checkpoint, number, length):
    directory, _ = checkpoint(dtype="fp8", shards=3)
    shard = directory / f"model-{number:05d}-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:length])
    assert_refused(directory, re.escape(shard.name) + ": truncated.*")


def test_a_tensor_in_another_shard(checkpoint):
    directory, _ = checkpoint(shards=3)

    def misplace(index):
        assert index["weight_map"][NORM] != SECOND
        index["weight_map"][NORM] = SECOND

    files.edit_json(directory / INDEX, misplace)
    assert_refused(directory, f"{SECOND}: lacks {NORM}, which the index places there")


def test_a_tensor_that_the_index_leaves_out(checkpoint):
    directory, _ = checkpoint(shards=3)
    files.edit_json(directory / INDEX, lambda index: index["weight_map"].pop(NORM))
    assert_refused(directory, f"checkpoint: missing tensor {NORM}")


def test_a_tensor_that_no_shard_holds(checkpoint):
    directory, _ = checkpoint(shards=3)
    extra = "model.layers.0.mlp.extra.weight"
    files.edit_json(directory / INDEX, lambda index: index["weight_map"].update({extra: SECOND}))
    assert_refused(directory, f"{SECOND}: lacks {extra}, which the index places there")


# ---- the tensors ---------------------------------------------------------------------------------


def change(directory, **changes):
    """Replaces tensors of a single file, or removes those that are None."""

    def apply(tensors):
        for name, tensor in changes.items():
            tensors[name] = tensor
            if tensor is None:
                del tensors[name]

    files.edit(directory / SINGLE, apply)


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", NORM, KV_A, EXPERT, BIAS],
)
def test_a_missing_tensor(checkpoint, name):
    directory, _ = checkpoint(small_config(num_nextn_predict_layers=0), dtype="fp8")
    change(directory, **{name: None})
    assert_refused(directory, f"checkpoint: missing tensor {name}")


def test_missing_tensors(checkpoint):
    directory, _ = checkpoint()
    change(directory, **{NORM: None, KV_A: None, EXPERT: None})
    assert_refused(directory, f"checkpoint: missing tensor {NORM} and 2 more")


@pytest.mark.parametrize("name", [KV_A, EXPERT])
def test_a_missing_scale(checkpoint, name):
    directory, _ = checkpoint(dtype="fp8")
    change(directory, **{f"{name}_scale_inv": None})
    for quantization in (None, "fp8"):
        missing = f"checkpoint: missing scale {name}_scale_inv"
        assert_refused(directory, missing, quantization=quantization)


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("shape", [(2, 3), (2, 2), (3, 2, 1), ()])
def test_a_scale_of_another_shape(checkpoint, shape, quantization):
    """40 rows and 64 columns in blocks of [16, 40] are 3 and 2 blocks, rounded up."""
    directory, _ = checkpoint(dtype="fp8", block=(16, 40))
    scale = f"{KV_A}_scale_inv"
    assert files.read(directory / SINGLE)[scale].shape == (3, 2)
    change(directory, **{scale: Stored.of(np.ones(shape, np.float32))})
    expected = re.escape(f"{scale}: expected shape (3, 2), got {shape}")
    assert_refused(directory, expected, quantization=quantization)


def test_a_scale_of_integers(checkpoint):
    directory, _ = checkpoint(dtype="fp8")
    scale = f"{KV_A}_scale_inv"
    for quantization in (None, "fp8"):
        change(directory, **{scale: Stored.of(np.ones((1, 1), np.int32))})
        expected = f"{scale}: expected F32 or BF16 or F8_E8M0, got I32"
        assert_refused(directory, expected, quantization=quantization)


@pytest.mark.parametrize("name", [KV_A, EXPERT])
@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_a_weight_of_another_shape(checkpoint, dtype, name):
    directory, _ = checkpoint(dtype=dtype)
    stored = files.read(directory / SINGLE)[name]
    rows, columns = stored.shape
    for wrong in ((columns, rows), (rows * columns,), (1, rows, columns)):
        change(directory, **{name: stored.reshaped(*wrong)})
        expected = re.escape(f"{name}: expected shape {(rows, columns)}, got {wrong}")
        assert_refused(directory, expected)


def test_weights_of_another_config(checkpoint):
    directory, _ = checkpoint()
    files.edit_json(directory / CONFIG, lambda config: config.update(vocab_size=161))
    assert_refused(directory, r"\S+: expected shape \(161, 64\), got \(160, 64\)")


@pytest.mark.parametrize(
    "extra",
    [
        "extra.weight",
        "lm_head.bias",
        "model.layers.0.self_attn.q_a_proj.bias",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.1.mlp.experts.4.up_proj.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq.weight",
        "model.layers.0.self_attn.my_rotary_emb_inv_freq",
        "model.layers.3.input_layernorm.weight",
    ],
)
def test_an_unknown_tensor(checkpoint, extra):
    directory, _ = checkpoint()
    change(directory, **{extra: Stored.of(np.ones(3, np.float32))})
    assert_refused(directory, f"checkpoint: unknown tensor {re.escape(extra)}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_tolerated_tensors(checkpoint, dtype):
    directory, expected = checkpoint(dtype=dtype)
    buffer = Stored.of(np.full(28, np.nan, np.float32))
    assert UNUSED_SUFFIXES
    for suffix in UNUSED_SUFFIXES:
        names = [f"model.layers.{layer}.self_attn{suffix}" for layer in range(3)]
        change(directory, **dict.fromkeys(names, buffer))
    assert_holds(loaded(directory), expected)


def test_a_weight_of_integers(checkpoint):
    """An integer format other than float8 would be cast to meaningless values."""
    directory, _ = checkpoint(dtype="bfloat16")
    for dtype in ("I32", "U8"):
        change(directory, **{KV_A: Stored.of(np.ones((40, 64), files.DTYPES[dtype]))})
        assert_refused(directory, f"{KV_A}: expected F32 or BF16, got {dtype}")


def test_a_weight_of_exponents(checkpoint):
    directory, _ = checkpoint(dtype="bfloat16")
    exponents = Stored.of(np.ones((40, 64), files.DTYPES["F8_E8M0"]))
    change(directory, **{KV_A: exponents})
    assert_refused(directory, f"{KV_A}: expected F32 or BF16, got F8_E8M0")


def test_a_norm_in_float8(checkpoint):
    directory, _ = checkpoint(dtype="fp8")
    norm = Stored.of(np.ones(64, files.DTYPES["F8_E4M3"]))
    change(directory, **{NORM: norm})
    assert_refused(directory, f"{NORM}: expected F32 or BF16, got F8_E4M3")
    change(directory, **{f"{NORM}_scale_inv": Stored.of(np.ones(1, np.float32))})
    assert_refused(directory, f"checkpoint: unknown tensor {NORM}_scale_inv")


@pytest.mark.parametrize("name", [KV_A, NORM])
def test_a_scale_without_a_float8_weight(checkpoint, name):
    """A tool has cast the weight without multiplying by the scale, so the values are wrong."""
    directory, _ = checkpoint(dtype="bfloat16")
    scale = f"{name}_scale_inv"
    change(directory, **{scale: Stored.of(np.ones((1, 1), np.float32))})
    assert_refused(
        directory, f"{scale}: a scale of {name}, which is BF16; config.json has no .*config"
    )


# ---- scales that no quantiser makes --------------------------------------------------------------


def put_scale(directory, at, value, name=KV_A):
    """Changes one scale of a 3 x 2 matrix of scales."""
    scale = files.read(directory / SINGLE)[f"{name}_scale_inv"].array.copy()
    scale[at] = value
    change(directory, **{f"{name}_scale_inv": Stored.of(scale)})


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0, -(2.0**-40)])
@pytest.mark.parametrize("name", [KV_A, EXPERT])
def test_a_scale_that_is_none(checkpoint, name, value, quantization):
    directory, _ = checkpoint(dtype="fp8", block=(16, 40))
    put_scale(directory, (1, 1), value, name)
    assert_refused_late(
        directory,
        f"{name}_scale_inv: expected scales that are finite and not negative, got {value}",
        quantization=quantization,
    )


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("value", [0.0, -0.0])
def test_a_scale_of_zero_over_weights(checkpoint, value, quantization):
    directory, _ = checkpoint(dtype="fp8", block=(16, 40))
    put_scale(directory, (2, 1), value)
    assert_refused_late(
        directory,
        f"{KV_A}_scale_inv: expected scales above 0 over weights that are not 0, "
        "got 0 for block 2, 1",
        quantization=quantization,
    )


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_scale_of_zero_over_zeros(checkpoint, quantization):
    """Zeros of either sign are accepted, because the meaning of such a scale is clear."""
    directory, expected = checkpoint(dtype="fp8", block=(16, 40))
    weight = files.read(directory / SINGLE)[KV_A].array.copy()
    weight[32:, 40:] = 0
    weight[33, 41] = -0.0
    change(directory, **{KV_A: Stored.of(weight)})
    put_scale(directory, (2, 1), 0.0)
    got = loaded(directory, quantization=quantization)
    assert (got[KV_A][32:, 40:].astype(np.float32) == 0).all()
    if quantization is None:
        np.testing.assert_array_equal(got[KV_A][:32], expected[KV_A][:32].astype(np.float32))


def assert_refused_late(directory, pattern, **options):
    """Expects a one-line refusal that may come after values have been read."""
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        dsv3_jax.load(directory, **options)
    assert re.fullmatch(pattern, str(caught.value))


# ---- the config and the directory ----------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v4", "", 3])
def test_an_unknown_model_type(checkpoint, model_type):
    directory, _ = checkpoint()
    files.edit_json(directory / CONFIG, lambda config: config.update(model_type=model_type))
    expected = f"model_type: expected one of deepseek_v2, .*; got {model_type!r}"
    assert_refused(directory, expected)


def test_an_indexer_without_its_tensors(checkpoint):
    directory, _ = checkpoint()
    sizes = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
    files.edit_json(
        directory / CONFIG, lambda config: config.update(model_type="deepseek_v32", **sizes)
    )
    missing = r"model\.layers\.0\.self_attn\.indexer\.wq_b\.weight"
    assert_refused(directory, rf"checkpoint: missing tensor {missing} and 14 more")


@pytest.mark.parametrize(
    "key",
    [
        "first_k_dense_replace",
        "hidden_size",
        "intermediate_size",
        "kv_lora_rank",
        "model_type",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_attention_heads",
        "num_hidden_layers",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "vocab_size",
    ],
)
def test_a_config_without_a_key(checkpoint, key):
    directory, _ = checkpoint()
    files.edit_json(directory / CONFIG, lambda config: config.pop(key))
    assert_refused(directory, f"config.json lacks the key '{key}': .+")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff{}", b"not JSON"])
def test_a_config_that_is_not_json(checkpoint, content):
    directory, _ = checkpoint()
    (directory / CONFIG).write_bytes(content)
    assert_refused(directory, re.escape(f"{directory / CONFIG} is not valid JSON: ") + ".*")


@pytest.mark.parametrize("content", [[], "text", None])
def test_a_config_that_is_not_an_object(checkpoint, content):
    directory, _ = checkpoint()
    (directory / CONFIG).write_text(json.dumps(content))
    assert_refused(
        directory, re.escape(f"{directory / CONFIG}: expected a JSON object, got ") + ".*"
    )


def test_no_config(checkpoint):
    directory, _ = checkpoint()
    (directory / CONFIG).unlink()
    assert_refused(
        directory, re.escape(f"expected a config.json, found none at {directory}") + ".*"
    )


def test_an_empty_directory(tmp_path):
    assert_refused(tmp_path, re.escape(f"expected a config.json, found none at {tmp_path}") + ".*")


def test_a_config_alone(checkpoint):
    directory, _ = checkpoint()
    (directory / SINGLE).rename(directory / "pytorch_model.bin")
    assert_refused(
        directory, re.escape(f"{directory}: expected {INDEX} or {SINGLE}, found neither")
    )
