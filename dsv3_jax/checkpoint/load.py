"""From a name to a model: the directory behind it, its config, its weights, its tokenizer."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Literal

import huggingface_hub
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dsv3_jax.checkpoint.parameters import load_model
from dsv3_jax.checkpoint.reader import CheckpointReader
from dsv3_jax.config import DTYPES, ModelConfig, check_choice
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.tokenizer import Tokenizer

DEMO = Path(__file__).parents[1] / "demo"

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def load(
    path_or_name: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    quantization: Literal["fp8"] | None = None,
    mtp: bool = True,
) -> tuple[DeepSeekV3, Tokenizer | None]:
    """Loads a checkpoint exactly as published on Hugging Face.

    Args:
      path_or_name: ``"demo"`` (a small trained model in this package), a directory with config.json
        and safetensors files, or a Hub name such as ``"deepseek-ai/DeepSeek-V3"``, which is looked
        up in the Hub's local cache and else downloaded.
      dtype: of weights and activations. Default bfloat16, on a CPU float32: CPUs emulate bfloat16.
      quantization: ``"fp8"`` keeps a float8 checkpoint's bytes and dequantises at use; None
        dequantises to ``dtype`` while loading.
      mtp: also load the multi-token prediction layers, where the checkpoint has them.

    Returns:
      The model and its tokenizer; None for a checkpoint without tokenizer.json.

    Raises:
      ValueError: no such checkpoint, or one that is incomplete, damaged or of an unknown kind; one
        line that says what was expected and what came.
    """
    if quantization not in (None, "fp8"):
        raise ValueError(f"quantization: expected 'fp8' or None, got {quantization!r}")
    if dtype is not None:
        check_choice("dtype", _name(dtype), DTYPES)
    directory = find(path_or_name)
    published = ModelConfig.from_hf(directory)
    tensors = CheckpointReader(directory)
    if quantization == "fp8" and published.quantization is None:
        raise ValueError(
            f"quantization='fp8' keeps float8 weights, and {directory} has no quantization_config"
        )
    layers = published.num_nextn_predict_layers
    if not mtp or not _has_mtp(published, tensors):
        layers = 0
    has_tokenizer = (directory / "tokenizer.json").is_file()
    tokenizer = Tokenizer(directory) if has_tokenizer else None
    default_dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    model = load_model(
        dataclasses.replace(published, num_nextn_predict_layers=layers),
        tensors,
        dtype=default_dtype if dtype is None else dtype,
        quantization=published.quantization if quantization == "fp8" else None,
    )
    return model, tokenizer


def _name(dtype: DTypeLike) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return str(dtype)


def _has_mtp(config: ModelConfig, tensors: CheckpointReader) -> bool:
    """Many tools drop the MTP layers and leave num_nextn_predict_layers as it was."""
    first = f"model.layers.{config.num_hidden_layers}."
    return any(name.startswith(first) for name in tensors)


def find(path_or_name: str | os.PathLike[str]) -> Path:
    """The local directory behind a path, ``"demo"`` or a Hub name; downloads if need be."""
    if path_or_name == "demo":
        return DEMO
    expected = "model: expected 'demo', a directory, or a Hub name"
    if not isinstance(path_or_name, (str, os.PathLike)):
        raise ValueError(f"{expected}; got {path_or_name!r}")
    name = os.fspath(path_or_name)
    if name and os.path.isdir(name):
        return Path(name)
    if os.path.exists(name):
        raise ValueError(f"{expected}; got the file {name!r}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise ValueError(f"{expected}; got {name!r}")
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the library's errors have no base of their own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"model {name!r}: no such directory, and not to be had from the Hub: {reason}"
        ) from None
