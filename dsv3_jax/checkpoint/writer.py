"""Writing a model as a Hugging Face directory in DeepSeek's published form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from dsv3_jax.checkpoint.formats import quantize
from dsv3_jax.checkpoint.kinds import check_new, new_directory
from dsv3_jax.checkpoint.parameters import published_tensors
from dsv3_jax.checkpoint.reader import (
    DESCRIPTION_BYTES,
    INDEX,
    NUMPY,
    index_content,
    json_text,
    shard_name,
    write_file,
)
from dsv3_jax.checkpoint.tensor_table import copies, published_tensor_names, tensor_table
from dsv3_jax.config import ModelConfig
from dsv3_jax.files import atomic_write, check_free
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import BlockQuantization
from dsv3_jax.words import os_error_message
from sharding.distributed import barrier


def write_checkpoint(
    model: DeepSeekV3,
    directory: Path,
    *,
    quantization: BlockQuantization | None = None,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    shard_bytes: int = 4_300_000_000,
    add_files: Callable[[Path], object] | None = None,
) -> None:
    """Writes config.json, the shards and their index.

    The directory appears under its name only when all files are written and synced. With several
    processes, all must call this function, and the first one writes.

    Args:
      directory: new directory. It must not exist.
      quantization: writes float8 weights with block scales, as in the published DeepSeek-V3. None
        writes ``dtype``. Embedding, head, router, norms and eh_proj always have ``dtype``. Float8
        weights of the model are written unchanged.
      dtype: DeepSeek publishes bfloat16. float32 preserves a trained model's weights exactly.
      shard_bytes: a new shard begins when a file would exceed this size.
      add_files: called with the unfinished directory to write further files, such as the
        tokenizer's.

    Raises:
      ValueError: the directory exists or another process is writing it; the model has float8
        weights and ``quantization`` differs from theirs; the model has integer weights, or lacks
        published tensors because another module replaces one; or the disk has too little space or
        failed.
    """
    check_new(directory)
    _check_modules(model)
    check_space(model.config, directory, quantization=quantization, dtype=dtype)
    barrier("checkpoint to be written")
    config = dataclasses.replace(model.config, quantization=quantization, dtype=dtype)
    weights = published_tensors(model)
    has_float8 = any(tensor.dtype == ml_dtypes.float8_e4m3fn for tensor in weights.values())
    if has_float8 and quantization != model.config.quantization:
        raise ValueError(
            f"the model holds float8 weights; expected quantization={model.config.quantization}, "
            f"got {quantization}"
        )
    if any(tensor.dtype in (np.int8, np.uint8) for tensor in weights.values()):
        raise ValueError(
            "the model holds integer weights, which no published form has; expected one that was "
            "loaded with quantization=None"
        )
    if jax.process_index():
        return
    tensors = _in_published_form(config, weights)
    shards = _split(tensors, shard_bytes)
    files = {shard_name(i, len(shards)): shard for i, shard in enumerate(shards, 1)}
    index = index_content(files, sum(tensor.nbytes for tensor in tensors.values()))
    try:
        with new_directory(directory) as partial:
            for name, shard in files.items():
                write_file(partial / name, shard)
            atomic_write(partial / "config.json", json_text(config.to_hf()))
            atomic_write(partial / INDEX, json_text(index))
            if add_files is not None:
                add_files(partial)
    except OSError as error:
        raise ValueError(f"{os_error_message(error)}; nothing was written") from None


def check_space(
    config: ModelConfig, directory: Path, *, quantization: BlockQuantization | None, dtype: str
) -> None:
    """Checks that a model's checkpoint fits on the disk, before a long preparation of it."""
    table = tensor_table(dataclasses.replace(config, quantization=quantization, dtype=dtype))
    size = sum(spec.nbytes for spec in table.values())
    check_free(directory, size + DESCRIPTION_BYTES * len(table))


def _check_modules(model: DeepSeekV3) -> None:
    """Checks that the parameters of a model are those of its configuration."""
    config = dataclasses.replace(model.config, quantization=None)
    expected = tensor_table(config).keys() - copies(config).keys()
    paths = [path for path, v in nnx.to_flat_state(nnx.state(model)) if isinstance(v, nnx.Variable)]
    got = {
        name
        for path in paths
        if path[-1] not in ("weight_scale_inv", "weight_scale")
        for name in published_tensor_names(config, path).names
    }
    for name in sorted(expected ^ got):
        kind = "none" if name in expected else "one"
        raise ValueError(
            f"{name}: expected the published tensors of {config.model_type}, got {kind} of this"
            " name, because a module was replaced; save the model's nnx.state with orbax"
        )


def _in_published_form(
    config: ModelConfig, tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Casts or quantizes every tensor to its published dtype. Adds the scales of float8 weights."""
    published: dict[str, np.ndarray] = {}
    table = tensor_table(config)
    for name, tensor in tensors.items():
        if table[name].dtype != "F8_E4M3" or tensor.dtype == ml_dtypes.float8_e4m3fn:
            published[name] = tensor.astype(NUMPY[table[name].dtype])
            continue
        assert config.quantization is not None
        published[name], scale = quantize(tensor, config.quantization)
        published[name + config.quantization.scale_suffix] = scale
    return published


def _split(tensors: Mapping[str, np.ndarray], limit: int) -> list[dict[str, np.ndarray]]:
    """Distributes tensors over shards of at most ``limit`` bytes, in order."""
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards
