"""Checks of flags that determine how a model is loaded, and how long its sequences are."""

from __future__ import annotations

import argparse
from numbers import Integral
from typing import TYPE_CHECKING

from dsv3_jax.generation.settings import check

if TYPE_CHECKING:
    from dsv3_jax.config import ModelConfig

_DEFAULT_MAX_LEN = 4096


def check_weights(arguments: argparse.Namespace) -> None:
    """Raises ValueError if ``--activations`` is given without the weights that it needs."""
    if arguments.activations and arguments.quantization not in ("fp8", "int4"):
        got = arguments.quantization or "none"
        raise ValueError(f"--activations: expected --quantization fp8 or int4 with it, got {got}")


def max_len_of(arguments: argparse.Namespace, config: ModelConfig) -> int:
    """Returns ``--max-len``, or its default.

    Raises:
      ValueError: it is more than the model has positions for.
    """
    most = config.max_position_embeddings
    if arguments.max_len is None:
        return min(_DEFAULT_MAX_LEN, most)
    expected = f"2 to {most} (the model's max_position_embeddings)"
    check("--max-len", arguments.max_len, expected, Integral, 2, most)
    return arguments.max_len
