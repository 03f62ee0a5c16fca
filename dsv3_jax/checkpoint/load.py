"""From a name to a model: the directory behind it, its config, its weights, its tokenizer."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dsv3_jax.checkpoint.arrays import Arrays
from dsv3_jax.checkpoint.check import with_layers_present
from dsv3_jax.checkpoint.find import find
from dsv3_jax.checkpoint.kinds import is_store
from dsv3_jax.checkpoint.messages import os_error_message
from dsv3_jax.checkpoint.parameters import load_model
from dsv3_jax.checkpoint.reader import CheckpointReader
from dsv3_jax.checkpoint.store import StoreReader
from dsv3_jax.config import DTYPES, ModelConfig
from dsv3_jax.field_checks import check_choice
from dsv3_jax.generation_config import with_end_tokens
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import IntegerQuantization
from dsv3_jax.tokenizer import Tokenizer
from sharding import DEFAULT_RULES, PRESETS, Layout, Placement, Rules, make_layout

_WEIGHTS = {
    "fp8": "float8 weights",
    "int8": "int8 weights",
    "int4": "int4 weights",
    None: "no quantization_config",
}


def load(
    path_or_name: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    quantization: Literal["fp8", "int8", "int4"] | None = None,
    activations: Literal["float8"] | None = None,
    mtp: bool = True,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    layout: Layout | str | None = None,
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
      layout: a mesh, rules, and how tokens reach their experts, in one: the name of one over all
        devices, such as ``"dp_attention_ep"``, or a :class:`sharding.Layout`.
      placement: where experts stand, some of them in several places: see
        :meth:`~dsv3_jax.model.DeepSeekV3.place_experts`. By default one place each.

    Returns:
      The model and its tokenizer; None for a checkpoint without tokenizer.json. Where the
      checkpoint has a generation_config.json with end tokens, those are the model's.

    Raises:
      ValueError: no such checkpoint, or one that is incomplete, damaged or of an unknown kind, one
        that ``dsv3 verify`` refuses by its names, shapes and dtypes, or a parameter that ``mesh``
        cannot split as ``rules`` say; one line that says what was expected and what came.
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
    check_kind("mtp", mtp, bool, "True or False")
    check_kind("mesh", mesh, Mesh | None, "a jax.sharding.Mesh or None")
    check_kind("rules", rules, Rules | None, "sharding.Rules or None")
    check_kind("layout", layout, Layout | str | None, "the name of a layout, a Layout or None")
    check_kind("placement", placement, Placement | None, "a sharding.Placement or None")
    if rules is not None and mesh is None:
        raise ValueError("rules: expected a mesh that they apply to, got None")
    if layout is not None and mesh is not None:
        raise ValueError("layout: expected no mesh beside it, got both")
    if mesh is not None:
        layout = Layout(mesh, rules or DEFAULT_RULES)
    if isinstance(layout, str):
        check_choice("layout", layout, PRESETS)
        layout = make_layout(layout)
    directory = find(path_or_name)
    tensors, published, source = _open(directory)
    if quantization is not None and quantization != (held := _form(published)):
        raise ValueError(
            f"quantization={quantization!r} keeps {_WEIGHTS[quantization]}, "
            f"and {directory} has {_WEIGHTS[held]}"
        )
    config = with_end_tokens(with_layers_present(published, tensors), source)
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
        raise ValueError(os_error_message(error)) from None
    if activations is not None:
        model.use_float8_activations()
    return model, tokenizer


def check_kind(name: str, value: Any, kind: Any, expected: str) -> None:
    """Raises ValueError, naming the argument, if a value is of another type than it should be."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}: expected {expected}, got {value!r:.80}")


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
