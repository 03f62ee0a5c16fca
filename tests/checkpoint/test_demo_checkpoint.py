"""The checkpoint in the package, and the tokenizer of any checkpoint."""

import json
import re
import shutil

import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.checkpoint.find import DEMO
from dsv3_jax.checkpoint.tensor_table import copies, tensor_table
from dsv3_jax.config import ModelConfig
from tests.checkpoint.files import CONFIG, read_directory
from tests.checkpoint.values import loaded, no_array_made

NUMPY = {"BF16": "bfloat16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}
TEXT = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1)  # déjà vu\n"


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_hf(DEMO)


def test_its_config_is_one_of_the_family(config):
    keys = json.loads((DEMO / CONFIG).read_text("utf-8"))
    assert keys["model_type"] == config.model_type == "deepseek_v3"
    assert config.quantization is not None
    assert config.num_nextn_predict_layers == 1
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_its_files_hold_the_published_tensors(config):
    stored = {name: (t.shape, t.dtype) for name, t in read_directory(DEMO).items()}
    table = {name: (spec.shape, spec.dtype) for name, spec in tensor_table(config).items()}
    assert stored == table


def test_it_is_small():
    assert sum(path.stat().st_size for path in DEMO.rglob("*")) <= 16_000_000


def test_as_float32(config):
    got = loaded("demo")
    table = tensor_table(config)
    scales = {name for name in table if name.endswith("_scale_inv")}
    assert {name: t.shape for name, t in got.items()} == {
        name: spec.shape for name, spec in table.items() if name not in scales
    }
    assert {t.dtype for t in got.values()} == {np.dtype(np.float32)}
    assert all(np.isfinite(t).all() and t.any() for t in got.values())


def test_as_published(config):
    got = loaded("demo", dtype="bfloat16", quantization="fp8")
    assert {name: (t.shape, str(t.dtype)) for name, t in got.items()} == {
        name: (spec.shape, NUMPY[spec.dtype]) for name, spec in tensor_table(config).items()
    }
    stored = read_directory(DEMO)
    assert all(tensor.tobytes() == stored[name].data for name, tensor in got.items())


def test_without_mtp(config):
    model, _ = dsv3_jax.load("demo", mtp=False)
    assert len(model.mtp) == 0
    got = loaded("demo", mtp=False)
    left_out = f"model.layers.{config.num_hidden_layers}."
    assert all(name.startswith(left_out) for name in copies(config))
    everything = {name for name in tensor_table(config) if not name.endswith("_scale_inv")}
    assert set(got) == {name for name in everything if not name.startswith(left_out)}


# ---- tokenizer -----------------------------------------------------------------------------------


def test_no_tokenizer(checkpoint):
    directory, _ = checkpoint()
    assert dsv3_jax.load(directory)[1] is None


def test_the_demo_has_one(config):
    _, tokenizer = dsv3_jax.load("demo")
    ids = tokenizer.encode(TEXT)
    assert 10 < len(ids) < len(TEXT)
    assert max(ids) < tokenizer.vocab_size <= config.vocab_size
    assert tokenizer.decode(ids) == TEXT


def test_a_tokenizer_is_read_from_the_directory(checkpoint):
    directory, _ = checkpoint()
    shutil.copy(DEMO / "tokenizer.json", directory)
    _, tokenizer = dsv3_jax.load(directory)
    _, of_demo = dsv3_jax.load("demo")
    plain = {"add_special_tokens": False}
    assert tokenizer.encode(TEXT, **plain) == of_demo.encode(TEXT, **plain)
    assert tokenizer.bos_token is None  # tokenizer_config.json would have named it
    shutil.copy(DEMO / "tokenizer_config.json", directory)
    _, tokenizer = dsv3_jax.load(directory)
    assert tokenizer.encode(TEXT) == of_demo.encode(TEXT)
    assert tokenizer.eos_token_id == of_demo.eos_token_id is not None


def test_a_tokenizer_that_cannot_be_read_is_known_before_the_weights(checkpoint):
    directory, _ = checkpoint()
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    with no_array_made(), pytest.raises(ValueError, match=r"not a tokenizer") as caught:
        dsv3_jax.load(directory)
    assert re.fullmatch(r".*/tokenizer\.json: not a tokenizer: .*", str(caught.value))
