"""Checkpoints with every tensor of `tensor_table`, for models that `random_tensors` does not cover.

Names, shapes and dtypes come from the table, so that these checkpoints cannot test the table.
"""

import dataclasses
import json
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np

from dsv3_jax import presets
from dsv3_jax.checkpoint.tensor_table import copies, tensor_table
from dsv3_jax.config import ModelConfig
from tests.checkpoint.files import Stored, Tensors, write
from tests.checkpoint.values import small_config

DTYPES = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}


def small_v3_2() -> ModelConfig:
    """Returns a small config with a sparse-attention indexer, published in float8."""
    return dataclasses.replace(
        ModelConfig.from_hf(small_config()),
        model_type="deepseek_v32",
        index_n_heads=4,
        index_head_dim=16,
        index_topk=8,
        quantization=presets.DEEPSEEK_V3_2.quantization,
    )


def write_table(directory: Path, config: ModelConfig, shards: int = 3) -> Tensors:
    """Writes config.json, shards and their index. Returns the tensors."""
    tensors: Tensors = {}
    for name, spec in tensor_table(config).items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        value = (
            rng.uniform(1e-4, 1e-2, spec.shape)
            if "_scale" in name
            else rng.normal(0, 30 if spec.dtype == "F8_E4M3" else 0.3, spec.shape)
        )
        tensors[name] = Stored.of(value.astype(DTYPES[spec.dtype]))
    for copy, original in copies(config).items():
        tensors[copy] = tensors[original]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config.to_hf(), indent=1))
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        # Distributed round-robin, so that a scale is never in the file of its weight.
        part = {name: tensors[name] for name in list(tensors)[i::shards]}
        write(directory / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors
