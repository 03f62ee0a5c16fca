"""A model as a Hugging Face directory in DeepSeek's published form."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import jax
import ml_dtypes
import numpy as np

from dsv3_jax.checkpoint.formats import quantize
from dsv3_jax.checkpoint.messages import os_error_message
from dsv3_jax.checkpoint.parameters import published_tensors
from dsv3_jax.checkpoint.reader import INDEX
from dsv3_jax.checkpoint.safetensors_file import write_file
from dsv3_jax.checkpoint.tensor_table import tensor_table
from dsv3_jax.checkpoint.unfinished import check_new, new_directory
from dsv3_jax.config import ModelConfig
from dsv3_jax.files import atomic_write
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import BlockQuantization
from sharding.distributed import barrier

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
    add_files: Callable[[Path], object] | None = None,
) -> None:
    """Writes config.json, the shards and their index; nothing appears until all of it is written
    and synced. The model is only read. Several processes call this alike; the first of them writes.

    Args:
      directory: must not exist.
      quantization: float8 weights with block scales, as DeepSeek-V3 is published; None writes
        ``dtype``. Embedding, head, router, norms and eh_proj are of ``dtype`` either way. Weights
        that the model holds in float8 are written as they are.
      dtype: DeepSeek publishes bfloat16; float32 keeps a trained model's weights bit for bit.
      shard_bytes: size past which a new shard begins.
      add_files: writes further files, such as the tokenizer's, to the directory that it is given,
        before the whole appears.

    Raises:
      ValueError: the directory exists or another process is writing it; the model holds float8
        weights and ``quantization`` is not theirs, or integer weights; the disk is full or fails.
    """
    check_new(directory)
    barrier("checkpoint to be written")
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
    shards = _split(tensors, shard_bytes)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    weight_map = {t: name for name, shard in zip(names, shards, strict=True) for t in shard}
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    try:
        with new_directory(directory) as partial:
            for name, shard in zip(names, shards, strict=True):
                write_file(partial / name, shard)
            _write_json(partial / "config.json", config.to_hf())
            _write_json(partial / INDEX, index)
            if add_files is not None:
                add_files(partial)
    except OSError as error:
        raise ValueError(f"{os_error_message(error)}; nothing was written") from None


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
    atomic_write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
