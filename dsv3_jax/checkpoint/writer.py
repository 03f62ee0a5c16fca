"""A model as a Hugging Face directory in DeepSeek's published form."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import jax
import ml_dtypes
import numpy as np

from dsv3_jax.checkpoint.formats import quantize
from dsv3_jax.checkpoint.names import tensor_table
from dsv3_jax.checkpoint.parameters import published_tensors
from dsv3_jax.checkpoint.reader import INDEX
from dsv3_jax.checkpoint.safetensors_file import write_file
from dsv3_jax.config import BlockQuantization, ModelConfig
from dsv3_jax.model import DeepSeekV3
from sharding.distributed import wait_for_all

_DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


def write_checkpoint(
    model: DeepSeekV3,
    directory: Path,
    *,
    quantization: BlockQuantization | None = None,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    shard_bytes: int = 4_300_000_000,
) -> None:
    """Writes config.json, the shards and their index; nothing appears until all of it is written.
    Several processes call this alike; the first of them writes.

    Args:
      directory: must not exist.
      quantization: float8 weights with block scales, as DeepSeek-V3 is published; None writes
        ``dtype``. Embedding, head, router, norms and eh_proj are of ``dtype`` either way. Weights
        that the model holds in float8 are written as they are.
      dtype: DeepSeek publishes bfloat16; float32 keeps a trained model's weights bit for bit.
      shard_bytes: size past which a new shard begins.

    Raises:
      ValueError: the directory exists, or the model holds float8 weights and ``quantization`` is
        not theirs, or integer weights.
    """
    if directory.exists():
        raise ValueError(f"expected a directory that does not exist yet, got {directory}")
    wait_for_all("checkpoint to be written")
    config = dataclasses.replace(model.config, quantization=quantization, dtype=dtype)
    held = published_tensors(model)
    float8 = any(tensor.dtype == ml_dtypes.float8_e4m3fn for tensor in held.values())
    if float8 and quantization != model.config.quantization:
        raise ValueError(
            f"the model holds float8 weights; expected quantization={model.config.quantization}, "
            f"got {quantization}"
        )
    if any(tensor.dtype in (np.int8, np.uint8) for tensor in held.values()):
        raise ValueError(
            "the model holds integer weights, which no published form has; expected one that was "
            "loaded with quantization=None"
        )
    if jax.process_index():
        return
    tensors = _published(config, held)
    partial = directory.with_name(directory.name + ".partial")
    if partial.exists():  # an interrupted run's, whose shards must not come along
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    _write_json(partial / "config.json", config.to_hf())
    shards = _split(tensors, shard_bytes)
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file_name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_file(partial / file_name, shard)
        weight_map |= dict.fromkeys(shard, file_name)
    size = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(partial / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    partial.rename(directory)


def _published(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Casts every tensor to its published dtype, float8 ones with their scales."""
    out: dict[str, np.ndarray] = {}
    table = tensor_table(config)
    for name, tensor in tensors.items():
        if table[name].dtype != "F8_E4M3" or tensor.dtype == ml_dtypes.float8_e4m3fn:
            out[name] = tensor.astype(_DTYPES[table[name].dtype])
            continue
        assert config.quantization is not None
        out[name], scale = quantize(tensor, config.quantization)
        out[name + config.quantization.scale_suffix] = scale
    return out


def _split(tensors: Mapping[str, np.ndarray], limit: int) -> list[dict[str, np.ndarray]]:
    shards: list[dict[str, np.ndarray]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    return shards


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
