"""The flags ``--quantization`` and ``--activations``."""

from __future__ import annotations

import argparse


def check_weights(arguments: argparse.Namespace) -> None:
    """Raises ValueError for ``--activations`` with weights that do not take them."""
    if arguments.activations is not None and arguments.quantization not in ("fp8", "int4"):
        got = arguments.quantization or "none"
        raise ValueError(f"--activations: expected --quantization fp8 or int4 with it, got {got}")
