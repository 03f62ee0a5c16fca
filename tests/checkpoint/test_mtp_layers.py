"""MTP layers of a checkpoint: loaded, left out, absent, incomplete, and their copies."""

import re

import numpy as np
import pytest
from flax import nnx

import dsv3_jax
from tests.checkpoint.files import CONFIG, SINGLE, Stored, edit, edit_json, read
from tests.checkpoint.values import assert_holds, loaded, same_bytes, small_config

MTP = "model.layers.2."
EMBEDDING = f"{MTP}embed_tokens.weight"
HEAD = f"{MTP}shared_head.head.weight"
ORIGINALS = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight"}


def of_model(tensors):
    """Returns the tensors of the main model."""
    return {name: t for name, t in tensors.items() if not re.match(r"model\.layers\.[23]\.", name)}


def keep(directory, wanted):
    """Removes the tensors for which `wanted` is false, and returns their names."""
    removed = [name for name in read(directory / SINGLE) if not wanted(name)]
    edit(directory / SINGLE, lambda tensors: [tensors.pop(name) for name in removed])
    return removed


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_with_and_without(checkpoint, dtype, layers):
    directory, expected = checkpoint(small_config(num_nextn_predict_layers=layers), dtype=dtype)
    model, _ = dsv3_jax.load(directory)
    assert len(model.mtp) == model.config.num_nextn_predict_layers == layers
    assert_holds(loaded(directory, mtp=True), expected)
    model, _ = dsv3_jax.load(directory, mtp=False)
    assert len(model.mtp) == model.config.num_nextn_predict_layers == 0
    assert len(of_model(expected)) < len(expected)
    assert_holds(loaded(directory, mtp=False), of_model(expected))


def test_float8_without_mtp_layers(checkpoint):
    directory, _ = checkpoint(dtype="fp8")
    whole = loaded(directory, quantization="fp8")
    assert same_bytes(loaded(directory, quantization="fp8", mtp=False), of_model(whole))


def test_embedding_and_head_are_loaded_once(checkpoint):
    directory, _ = checkpoint()
    model, _ = dsv3_jax.load(directory)
    large = [path for path, leaf in nnx.to_flat_state(nnx.state(model)) if 160 in leaf.shape]
    assert sorted(large) == [("embed_tokens", "weight"), ("lm_head", "weight")]


@pytest.mark.parametrize("mtp", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_promised_and_absent(checkpoint, dtype, mtp):
    """transformers drops the layer when it saves a model, but keeps the number in the config."""
    directory, expected = checkpoint(dtype=dtype)
    assert keep(directory, lambda name: not name.startswith(MTP))
    model, _ = dsv3_jax.load(directory, mtp=mtp)
    assert model.config.num_nextn_predict_layers == 0
    assert_holds(loaded(directory, mtp=mtp), of_model(expected))


@pytest.mark.parametrize("mtp", [True, False])
def test_present_and_not_promised(checkpoint, mtp):
    directory, expected = checkpoint()
    edit_json(directory / CONFIG, lambda config: config.pop("num_nextn_predict_layers"))
    assert_holds(loaded(directory, mtp=mtp), of_model(expected))


@pytest.mark.parametrize(
    "lost",
    [
        "eh_proj.weight",
        "enorm.weight",
        "hnorm.weight",
        "shared_head.norm.weight",
        "input_layernorm.weight",
        "self_attn.kv_b_proj.weight",
        "mlp.gate.e_score_correction_bias",
        "mlp.experts.3.down_proj.weight",
    ],
)
def test_one_tensor_short(checkpoint, lost):
    directory, _ = checkpoint()
    assert keep(directory, lambda name: name != MTP + lost) == [MTP + lost]
    with pytest.raises(ValueError, match=rf"^checkpoint: missing tensor {re.escape(MTP + lost)}$"):
        dsv3_jax.load(directory)


@pytest.mark.parametrize("remaining", [EMBEDDING, HEAD, f"{MTP}enorm.weight"])
def test_one_tensor_left(checkpoint, remaining):
    directory, _ = checkpoint()
    keep(directory, lambda name: name == remaining or not name.startswith(MTP))
    with pytest.raises(ValueError, match=rf"^checkpoint: missing tensor {MTP}\S+ and \d+ more$"):
        dsv3_jax.load(directory)


def test_one_layer_of_two(checkpoint):
    directory, _ = checkpoint(small_config(num_nextn_predict_layers=2))
    keep(directory, lambda name: not name.startswith("model.layers.3."))
    with pytest.raises(ValueError, match=r"^checkpoint: missing tensor model\.layers\.3\.\S+ and"):
        dsv3_jax.load(directory)


@pytest.mark.parametrize("mtp", [True, False])
def test_a_layer_of_the_model_is_not_taken_for_mtp(checkpoint, mtp):
    """If num_hidden_layers is too small, the last layer must not be dropped silently."""
    directory, _ = checkpoint(small_config(num_nextn_predict_layers=0))
    edit_json(directory / CONFIG, lambda config: config.update(num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"^checkpoint: unknown tensor model\.layers\.1\.\S+ and"):
        dsv3_jax.load(directory, mtp=mtp)


# ---- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("absent", [{EMBEDDING}, {HEAD}, {EMBEDDING, HEAD}])
def test_copies_may_be_absent(checkpoint, absent, quantization):
    directory, _ = checkpoint(dtype="fp8")
    before = loaded(directory, quantization=quantization)
    assert set(keep(directory, lambda name: name not in absent)) == absent
    assert same_bytes(loaded(directory, quantization=quantization), before)


def in_one_bit(tensor):
    return Stored(tensor.dtype, tensor.shape, tensor.data[:-1] + bytes([tensor.data[-1] ^ 1]))


def in_a_row(tensor):
    return Stored(tensor.dtype, (159, 64), tensor.data[: -tensor.array[0].nbytes])


def in_dtype(tensor):
    return Stored.of(tensor.array.astype(np.float32))


@pytest.mark.parametrize("differing", [in_one_bit, in_dtype])
@pytest.mark.parametrize("copy", ORIGINALS)
def test_copies_must_not_differ(checkpoint, copy, differing):
    directory, _ = checkpoint(dtype="bfloat16")
    edit(directory / SINGLE, lambda tensors: tensors.update({copy: differing(tensors[copy])}))
    with pytest.raises(ValueError, match=r"^\S+: differs from \S+, which it should") as caught:
        dsv3_jax.load(directory)
    assert copy in str(caught.value)
    assert ORIGINALS[copy] in str(caught.value)


@pytest.mark.parametrize("copy", ORIGINALS)
def test_copies_must_have_the_shape_of_their_originals(checkpoint, copy):
    directory, _ = checkpoint(dtype="bfloat16")
    edit(directory / SINGLE, lambda tensors: tensors.update({copy: in_a_row(tensors[copy])}))
    message = rf"^{re.escape(copy)}: expected shape \(160, 64\), got \(159, 64\)$"
    with pytest.raises(ValueError, match=message):
        dsv3_jax.load(directory)


@pytest.mark.parametrize("copy", ORIGINALS)
def test_copies_of_a_layer_that_is_left_out_may_differ(checkpoint, copy):
    directory, expected = checkpoint()
    edit(directory / SINGLE, lambda tensors: tensors.update({copy: in_one_bit(tensors[copy])}))
    assert_holds(loaded(directory, mtp=False), of_model(expected))


def test_copies_are_compared_by_bytes(checkpoint):
    """NaN equals itself in this comparison, so a value that is damaged in both is still a copy."""
    directory, _ = checkpoint()

    def spoil(tensors):
        for name in (EMBEDDING, ORIGINALS[EMBEDDING]):
            array = tensors[name].array.copy()
            array[3, 5] = np.nan
            tensors[name] = Stored.of(array)

    edit(directory / SINGLE, spoil)
    got = loaded(directory)
    assert np.isnan(got[EMBEDDING][3, 5])
    assert np.isnan(got[EMBEDDING]).sum() == 1
