"""Loading a model and its tokenizer from a directory, a store, or a Hub name."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from dsv3_jax import compile_cache
from dsv3_jax.checkpoint.manifest import FOLDER
from dsv3_jax.checkpoint.open_checkpoint import open_checkpoint
from dsv3_jax.checkpoint.parameters import load_model
from dsv3_jax.config import DTYPES, ModelConfig
from dsv3_jax.field_checks import check_choice
from dsv3_jax.generation_config import with_absent_tokens, with_end_tokens
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.other_names import hints
from dsv3_jax.quantization import CacheDtype, IntegerQuantization
from dsv3_jax.tokenizer import Tokenizer
from dsv3_jax.words import os_error_message
from sharding import DEFAULT_RULES, PRESETS, Layout, Placement, Rules, make_layout

# Description of the weights in a checkpoint, by the value of ``quantization`` that keeps them.
_WEIGHTS = {
    "fp8": "float8 weights",
    "int8": "int8 weights",
    "int4": "int4 weights",
    None: "no quantization_config",
}


@hints
def load(
    path_or_name: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    quantization: Literal["fp8", "int8", "int4"] | None = None,
    activations: Literal["float8"] | None = None,
    cache_dtype: CacheDtype | None = None,
    mtp: bool = True,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    layout: Layout | str | None = None,
    placement: Placement | None = None,
) -> tuple[DeepSeekV3, Tokenizer | None]:
    """Loads a checkpoint exactly as published on Hugging Face, or a store converted from one.

    It also enables JAX's compilation cache, see :mod:`dsv3_jax.compile_cache`.

    Args:
      path_or_name: ``"demo"`` or ``"demo-sparse"`` (small trained models in this package, without
        and with sparse attention), a directory with config.json and safetensors files, a converted
        store, or a Hub name such as ``"deepseek-ai/DeepSeek-V3"``, which is downloaded unless the
        Hub's local cache has it.
      dtype: dtype of weights and activations. The default is bfloat16, but float32 on CPUs, which
        only emulate bfloat16.
      quantization: keeps weights in this stored form, and dequantizes them when they are used: the
        published float8, or the integers of a store. None dequantizes to ``dtype`` while loading,
        to the exact product of value and scale, rounded once.
      activations: ``"float8"`` also rounds the activations that are multiplied by float8 weights
        or by int4 experts, if there are many rows, as in prompts and large batches: more than 64
        per matrix. DeepSeek's own inference does this. None rounds no activations.
      cache_dtype: ``"fp8"`` makes attention cache latents and indexer keys in float8,
        ``"fp8_index"`` indexer keys alone; see
        :meth:`~dsv3_jax.model.DeepSeekV3.use_cache_dtype`. None caches ``dtype``.
      mtp: also load the multi-token prediction layers, if the checkpoint has them.
      mesh: shards the model over the devices of the mesh. Each process reads only its own shards.
      rules: mesh axes of each logical axis. The default is :data:`sharding.DEFAULT_RULES`.
      layout: mesh, rules and expert exchange together, instead of ``mesh`` and ``rules``: a
        :class:`sharding.Layout`, or the name of a layout over all devices such as
        ``"dp_attention_ep"``.
      placement: assignment of experts to slots, in which an expert may have several: see
        :meth:`~dsv3_jax.model.DeepSeekV3.place_experts`. By default every expert has one slot.

    Returns:
      The model and its tokenizer, which is None for a checkpoint without tokenizer.json. If the
      checkpoint has generation_config.json, the model's end tokens are those in it. BOS and end
      tokens that config.json lacks are those of generation_config.json or of the tokenizer.

    Raises:
      ValueError: there is no such checkpoint; it is incomplete, damaged or of an unknown kind;
        ``dsv3 verify`` would refuse its names, shapes or dtypes; or ``rules`` cannot shard a
        parameter over ``mesh``. The message is one line with expected and got.
    """
    if quantization not in (None, "fp8", "int8", "int4"):
        raise ValueError(
            f"quantization: expected 'fp8', 'int8', 'int4' or None, got {quantization!r}"
        )
    if activations is not None:
        check_choice("activations", activations, ("float8",))
        if quantization not in ("fp8", "int4"):
            raise ValueError(
                "activations='float8': expected quantization='fp8' or 'int4', got"
                f" quantization={quantization!r}"
            )
    if cache_dtype is not None:
        check_choice("cache_dtype", cache_dtype, get_args(CacheDtype))
    if dtype is not None:
        check_choice("dtype", _dtype_name(dtype), DTYPES)
    _check_type("mtp", mtp, bool, "True or False")
    _check_type("mesh", mesh, Mesh | None, "a jax.sharding.Mesh or None")
    _check_type("rules", rules, Rules | None, "sharding.Rules or None")
    _check_type("layout", layout, Layout | str | None, "the name of a layout, a Layout or None")
    _check_type("placement", placement, Placement | None, "a sharding.Placement or None")
    if rules is not None and mesh is None:
        raise ValueError("rules: expected a mesh that they apply to, got None")
    if layout is not None and mesh is not None:
        raise ValueError("layout: expected no mesh with a layout, got both")
    if mesh is not None:
        layout = Layout(mesh, rules or DEFAULT_RULES)
    if isinstance(layout, str):
        check_choice("layout", layout, PRESETS)
        layout = make_layout(layout)
    directory, published, tensors, manifest = open_checkpoint(path_or_name)
    source = directory if manifest is None else directory / FOLDER
    compile_cache.enable()
    if quantization is not None and quantization != (stored := stored_form(published)):
        raise ValueError(
            f"quantization={quantization!r} keeps {_WEIGHTS[quantization]}, "
            f"and {directory} has {_WEIGHTS[stored]}"
        )
    tokenizer = Tokenizer(source) if (source / "tokenizer.json").is_file() else None
    plain = getattr(published.quantization, "modules_to_not_convert", ())
    if quantization == "fp8" and plain:  # a model has one form of all weights
        raise ValueError(
            f"quantization='fp8': expected float8 weights, and {directory} has {plain[0]} in"
            f" {published.dtype} (modules_to_not_convert in config.json); None dequantizes all"
            " weights"
        )
    config = with_end_tokens(published, source)
    config = with_absent_tokens(config, source, tokenizer)
    if not mtp:
        config = dataclasses.replace(config, num_nextn_predict_layers=0)
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
    except OSError as error:  # the disk failed, or a chunk is missing
        raise ValueError(os_error_message(error)) from None
    if activations is not None:
        model.use_float8_activations()
    if cache_dtype is not None:
        model.use_cache_dtype(cache_dtype)
    return model, tokenizer


def _check_type(name: str, value: Any, kind: Any, expected: str) -> None:
    """Raises ValueError, with the name of the argument, if a value has another type."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}: expected {expected}, got {value!r:.80}")


def stored_form(config: ModelConfig) -> str | None:
    """Returns the value of ``quantization`` that keeps the weights of an open checkpoint."""
    if isinstance(config.quantization, IntegerQuantization):
        return f"int{config.quantization.bits}"
    return "fp8" if config.quantization else None


def _dtype_name(dtype: DTypeLike) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return str(dtype)
