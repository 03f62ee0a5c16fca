"""A model and its tokenizer as one Hugging Face directory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

from dsv3_jax import tokenizer as tokenizers
from dsv3_jax.checkpoint.writer import write_checkpoint
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import BlockQuantization

To = Literal["bf16", "fp8", "float32"]


def write(model: DeepSeekV3, directory: Path, to: To, tokenizer: Path | None) -> None:
    """Writes the model as :func:`dsv3_jax.load` and transformers read it.

    Args:
      directory: must not exist.
      to: type of the weights; fp8 in blocks of 128x128 with scales, as DeepSeek-V3 is published.
      tokenizer: directory to copy the tokenizer's files from.
    """
    quantization = BlockQuantization() if to == "fp8" else None
    dtype = "float32" if to == "float32" else "bfloat16"
    copy = None if tokenizer is None else functools.partial(tokenizers.copy, tokenizer)
    write_checkpoint(model, directory, quantization=quantization, dtype=dtype, add_files=copy)
