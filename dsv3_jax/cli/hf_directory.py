"""Writes a model and its tokenizer as a Hugging Face directory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

from dsv3_jax import tokenizer_files
from dsv3_jax.checkpoint import writer
from dsv3_jax.config import ModelConfig
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import BlockQuantization

WeightFormat = Literal["bf16", "fp8", "float32"]


def write(
    model: DeepSeekV3, directory: Path, weight_format: WeightFormat, tokenizer: Path | None
) -> None:
    """Writes a new directory that :func:`dsv3_jax.load` and transformers can read, with the files
    of a directory with a tokenizer, or without. fp8 has blocks of 128x128 with scales, as
    DeepSeek-V3 is published."""
    quantization, dtype = _form(weight_format)
    copy = None if tokenizer is None else functools.partial(tokenizer_files.copy, tokenizer)
    writer.write_checkpoint(
        model, directory, quantization=quantization, dtype=dtype, add_files=copy
    )


def check_space(config: ModelConfig, directory: Path, weight_format: WeightFormat) -> None:
    """Checks that :func:`write` will have enough space. Raises ValueError otherwise."""
    quantization, dtype = _form(weight_format)
    writer.check_space(config, directory, quantization=quantization, dtype=dtype)


def _form(
    weight_format: WeightFormat,
) -> tuple[BlockQuantization | None, Literal["bfloat16", "float32"]]:
    quantization = BlockQuantization() if weight_format == "fp8" else None
    return quantization, "float32" if weight_format == "float32" else "bfloat16"
