"""Tests that trained weights survive a checkpoint in bfloat16 and in float8."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax import ModelConfig
from dsv3_jax.checkpoint.parameters import published_tensors
from dsv3_jax.checkpoint.reader import CheckpointReader
from dsv3_jax.checkpoint.writer import write_checkpoint
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import BlockQuantization
from tests.support.checkpoints import BIAS, is_fp8, random_tensors, tiny_config
from tests.support.checkpoints import write_checkpoint as write_published
from tests.support.oracle import dequantize, relative_error


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> DeepSeekV3:
    """A float32 model with dense, MoE and MTP layers."""
    directory = tmp_path_factory.mktemp("trained")
    config = tiny_config(num_hidden_layers=2, num_nextn_predict_layers=2)
    write_published(directory, config, random_tensors(config))
    return dsv3_jax.load(directory, dtype=jnp.float32)[0]


def bits(directory: Path) -> dict[str, tuple[np.dtype, tuple[int, ...], bytes]]:
    return {n: (t.dtype, t.shape, t[...].tobytes()) for n, t in CheckpointReader(directory).items()}


def test_bfloat16_round_trip(trained, tmp_path):
    write_checkpoint(trained, tmp_path / "one", shard_bytes=100_000)
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 1
    assert ModelConfig.from_hf(tmp_path / "one") == dataclasses.replace(
        trained.config, dtype="bfloat16"
    )
    loaded, _ = dsv3_jax.load(tmp_path / "one", dtype=jnp.bfloat16)
    tensors = published_tensors(loaded)
    originals = published_tensors(trained)
    assert tensors.keys() == originals.keys()
    for name, original in originals.items():
        dtype = np.float32 if name.endswith(BIAS) else ml_dtypes.bfloat16
        assert tensors[name].dtype == dtype
        np.testing.assert_array_equal(tensors[name], original.astype(dtype))
    write_checkpoint(loaded, tmp_path / "two")
    assert bits(tmp_path / "two") == bits(tmp_path / "one")


@pytest.mark.parametrize(
    "quantization",
    [BlockQuantization(), BlockQuantization((24, 40), "ue8m0")],
    ids=["published block", "small block, ue8m0"],
)
def test_float8_round_trip(quantization, trained, tmp_path):
    write_checkpoint(trained, tmp_path / "one", quantization=quantization)
    loaded, _ = dsv3_jax.load(tmp_path / "one", quantization="fp8")
    assert loaded.config.quantization == quantization
    write_checkpoint(loaded, tmp_path / "two", quantization=quantization)
    assert bits(tmp_path / "two") == bits(tmp_path / "one")

    stored = CheckpointReader(tmp_path / "one")
    cast = published_tensors(dsv3_jax.load(tmp_path / "one", dtype=jnp.float32)[0])
    for name, original in published_tensors(trained).items():
        if not is_fp8(name):
            assert f"{name}_scale_inv" not in stored
            continue
        assert stored[name].dtype == ml_dtypes.float8_e4m3fn
        scale = stored[f"{name}_scale_inv"][...]
        values = dequantize(stored[name][...], scale, quantization.weight_block_size)
        np.testing.assert_array_equal(cast[name], values.astype(np.float32))
        # e4m3 has three mantissa bits: an error of at most 1/16, and 2.7% over many values.
        assert relative_error(values, original) < 0.04
