"""From a name to a model: the directory behind it, its config, its weights, its tokenizer."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Literal

import huggingface_hub
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dsv3_jax.checkpoint.arrays import Arrays
from dsv3_jax.checkpoint.check import with_layers_present
from dsv3_jax.checkpoint.failures import said
from dsv3_jax.checkpoint.parameters import load_model
from dsv3_jax.checkpoint.reader import INDEX, SINGLE, CheckpointReader
from dsv3_jax.checkpoint.store import StoreReader, is_store
from dsv3_jax.config import DTYPES, IntegerQuantization, ModelConfig, check_choice
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.tokenizer import Tokenizer
from sharding import DEFAULT_RULES, Layout, Placement, Rules

DEMO = Path(__file__).parents[1] / "demo"

_WEIGHTS = {
    "fp8": "float8 weights",
    "int8": "int8 weights",
    "int4": "int4 weights",
    None: "no quantization_config",
}

_HUB_FILES = ["*.json", "*.jinja"]  # small ones: what the checkpoint is, and its tokenizer


def load(
    path_or_name: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    quantization: Literal["fp8", "int8", "int4"] | None = None,
    activations: Literal["float8"] | None = None,
    mtp: bool = True,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    layout: Layout | None = None,
    placement: Placement | None = None,
) -> tuple[DeepSeekV3, Tokenizer | None]:
    """Loads a checkpoint exactly as published on Hugging Face, or a store converted from one.

    Args:
      path_or_name: ``"demo"`` (a small trained model in this package), a directory with config.json
        and safetensors files, a converted store, or a Hub name such as
        ``"deepseek-ai/DeepSeek-V3"``, which is looked up in the Hub's local cache and else
        downloaded.
      dtype: of weights and activations. Default bfloat16, on a CPU float32: CPUs emulate bfloat16.
      quantization: keeps weights that are stored in this form, float8 as published or a store's
        integers, and dequantises at use. None dequantises to ``dtype`` while loading: the exact
        product of value and scale, rounded once.
      activations: ``"float8"`` rounds the rows of products with float8 weights to float8 as well,
        where they are many: prompts and large batches. DeepSeek's own inference does. None rounds
        nothing.
      mtp: also load the multi-token prediction layers, where the checkpoint has them.
      mesh: spreads the model over its devices, each of which reads its own part alone.
      rules: what each axis of ``mesh`` splits. Default :data:`sharding.DEFAULT_RULES`.
      layout: a mesh, rules, and how tokens reach their experts, in one, such as
        ``sharding.make_layout("dp_attention_ep")``.
      placement: where experts stand, some of them in several places: see
        :meth:`~dsv3_jax.model.DeepSeekV3.place_experts`. By default one place each.

    Returns:
      The model and its tokenizer; None for a checkpoint without tokenizer.json.

    Raises:
      ValueError: no such checkpoint, or one that is incomplete, damaged or of an unknown kind, or
        a parameter that ``mesh`` cannot split as ``rules`` say; one line that says what was
        expected and what came.
    """
    if quantization not in (None, "fp8", "int8", "int4"):
        raise ValueError(
            f"quantization: expected 'fp8', 'int8', 'int4' or None, got {quantization!r}"
        )
    if activations is not None:
        check_choice("activations", activations, ("float8",))
        if quantization != "fp8":
            raise ValueError(
                "activations='float8': expected quantization='fp8', got"
                f" quantization={quantization!r}"
            )
    if dtype is not None:
        check_choice("dtype", _name(dtype), DTYPES)
    if rules is not None and mesh is None:
        raise ValueError("rules: expected a mesh that they apply to, got None")
    if layout is not None and mesh is not None:
        raise ValueError("layout: expected no mesh beside it, got both")
    if mesh is not None:
        layout = Layout(mesh, rules or DEFAULT_RULES)
    directory = find(path_or_name)
    tensors, published, source = _open(directory)
    if quantization is not None and quantization != (held := _form(published)):
        raise ValueError(
            f"quantization={quantization!r} keeps {_WEIGHTS[quantization]}, "
            f"and {directory} has {_WEIGHTS[held]}"
        )
    config = with_layers_present(published, tensors)
    if not mtp:
        config = dataclasses.replace(config, num_nextn_predict_layers=0)
    tokenizer = Tokenizer(source) if (source / "tokenizer.json").is_file() else None
    default_dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    try:
        model = load_model(
            config,
            tensors,
            dtype=default_dtype if dtype is None else dtype,
            quantization=config.quantization if quantization else None,
            layout=layout,
            placement=placement,
        )
    except OSError as error:  # a disk that fails, a chunk that is gone
        raise ValueError(said(error)) from None
    if activations is not None:
        model.use_float8_activations()
    return model, tokenizer


def find_description(path_or_name: str | os.PathLike[str]) -> Path:
    """The directory with a checkpoint's config.json and tokenizer: of a store, what it keeps."""
    directory = find(path_or_name)
    return StoreReader(directory).source if is_store(directory) else directory


def _open(directory: Path) -> tuple[Arrays, ModelConfig, Path]:
    """The tensors, what they are the weights of, and where the tokenizer's files are."""
    if is_store(directory):
        store = StoreReader(directory)
        return store, store.config, store.source
    config = ModelConfig.from_hf(directory)
    return CheckpointReader(directory), config, directory


def _form(config: ModelConfig) -> str | None:
    if isinstance(config.quantization, IntegerQuantization):
        return f"int{config.quantization.bits}"
    return "fp8" if config.quantization else None


def _name(dtype: DTypeLike) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return str(dtype)


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
    directory = _download(name, _HUB_FILES)
    # Before gigabytes come: a model of another kind is refused here.
    ModelConfig.from_hf(directory)
    return _download(name, [*_HUB_FILES, *_shards(directory)])


def _download(name: str, patterns: list[str]) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the library's errors have no base of their own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"model {name!r}: no such directory, and not to be had from the Hub: {reason}"
        ) from None


def _shards(directory: Path) -> list[str]:
    """The files that the index names, or the one without an index.

    Whatever else is wrong with an index is for the reader to say.
    """
    if not (index := directory / INDEX).is_file():
        return [SINGLE]
    try:
        files = list(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return []
    plain = (file for file in files if isinstance(file, str))
    return sorted({file for file in plain if re.fullmatch(r"[\w.-]+\.safetensors", file)})
