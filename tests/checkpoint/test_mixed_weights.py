"""Float8 checkpoints in which config.json lists modules that are not quantized."""

import json
import re

import ml_dtypes
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.checkpoint.compare import compare
from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.checkpoint.export import export
from dsv3_jax.checkpoint.open_checkpoint import open_checkpoint
from dsv3_jax.checkpoint.verify import verify
from tests.checkpoint import files
from tests.checkpoint.files import CONFIG, SINGLE, Stored
from tests.checkpoint.values import assert_holds, loaded

O_PROJ = "model.layers.0.self_attn.o_proj"
MTP = "model.layers.2"
SUFFIX = "_scale_inv"


@pytest.fixture
def mixed(checkpoint):
    """Writes a checkpoint whose modules with these beginnings are plain. Returns its directory and
    exact values."""

    def write(*plain: str, listed=None, key="modules_to_not_convert"):
        directory, expected = checkpoint(dtype="fp8")

        def change(tensors):
            for scale in [n for n in tensors if n.endswith(SUFFIX) and n.startswith(plain)]:
                del tensors[scale]
                name = scale.removesuffix(SUFFIX)
                value = expected[name].astype(ml_dtypes.bfloat16)
                tensors[name] = Stored.of(value)
                expected[name] = value.astype(np.float64)

        files.edit(directory / SINGLE, change)
        names = list(plain) if listed is None else listed
        files.edit_json(
            directory / CONFIG, lambda config: config["quantization_config"].update({key: names})
        )
        return directory, expected

    return write


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize(
    ("plain", "listed"),
    [
        ((O_PROJ,), ["lm_head", O_PROJ]),
        (("model.layers.0.self_attn.",), ["model.layers.0.self_attn"]),
        (("model.layers.1.mlp.experts.",), ["model.layers.1.mlp.experts", "mlp.gate"]),
        ((f"{MTP}.",), [MTP]),
        ((O_PROJ,), ["model.layers.*.o_proj"]),
        ((O_PROJ,), [".*self_attn.*"]),
        ((O_PROJ,), ["self_attn.o_proj"]),  # listed modules may have scales all the same
        ((), ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.self_attn"]),
    ],
)
def test_values(mixed, key, plain, listed):
    directory, expected = mixed(*plain, listed=listed, key=key)
    assert_holds(loaded(directory), expected)
    opened = open_checkpoint(directory)
    assert not verify(opened).findings
    assert opened.config.quantization is not None
    modules = opened.config.quantization.modules_to_not_convert
    weights = files.read(directory / SINGLE)
    assert {f"{module}.weight" for module in modules} == {
        name
        for name in weights
        if plain
        and name.startswith(plain)
        and "_proj" in name
        and not name.endswith("eh_proj.weight")
    }


@pytest.mark.parametrize("to", ["fp8", "bf16", "int8"])
def test_stores(mixed, tmp_path, to):
    """A store has the same values, or keeps the bytes and gives the source's files back."""
    directory, _ = mixed(O_PROJ, "model.layers.1.mlp.experts.")
    store = tmp_path / "store"
    convert(directory, store, to)
    comparison = compare(open_checkpoint(directory), open_checkpoint(store))
    assert not comparison.findings
    if to != "int8":
        assert_holds(
            loaded(store, dtype="bfloat16"), loaded(directory, dtype="bfloat16"), "bfloat16"
        )
    export(store, tmp_path / "exported", "fp8" if to != "bf16" else None)
    exported = open_checkpoint(tmp_path / "exported")
    assert not verify(exported).findings
    if to == "fp8":
        assert (tmp_path / "exported" / SINGLE).read_bytes() == (directory / SINGLE).read_bytes()
    else:
        content = json.loads((tmp_path / "exported" / CONFIG).read_text())
        assert "modules_to_not_convert" not in content.get("quantization_config", {})


def test_a_model_has_one_form_of_weights(mixed):
    directory, _ = mixed(O_PROJ)
    message = (
        f"quantization='fp8': expected float8 weights, and {directory} has {O_PROJ} in bfloat16"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        dsv3_jax.load(directory, quantization="fp8")
    dsv3_jax.load(mixed(listed=[O_PROJ])[0], quantization="fp8")


@pytest.mark.parametrize(
    ("plain", "listed"),
    [
        ((O_PROJ,), []),
        ((O_PROJ,), ["model.layers.0.self_attn.o", "o_pro", "proj", "model.layers.1"]),
    ],
)
def test_a_module_that_is_not_listed(mixed, plain, listed):
    directory, _ = mixed(*plain, listed=listed)
    with pytest.raises(ValueError, match=rf"missing scale {O_PROJ}\.weight_scale_inv"):
        dsv3_jax.load(directory)


def test_experts_of_one_array_have_one_form(mixed, tmp_path):
    """They load, because each is dequantized. A store that keeps their bytes stacks them."""
    directory, expected = mixed("model.layers.1.mlp.experts.2.")
    assert_holds(loaded(directory), expected)
    with pytest.raises(ValueError, match=r"experts\.2\..*: expected float8_e4m3fn as in"):
        convert(directory, tmp_path / "store", "fp8")
    convert(directory, tmp_path / "other", "bf16")
