"""Paths of parameters in the tree of a model."""

from __future__ import annotations

from typing import Any

ParameterPath = tuple[Any, ...]
"""Keys from the root of the model to one parameter, as ``nnx.to_flat_state`` returns them:
``("layers", 3, "mlp", "experts", "gate_proj", "weight")``.

A key is the name of an attribute or an index of a list. nnx declares both as any hashable type."""


def dotted(path: ParameterPath) -> str:
    """Joins the keys by dots: ``layers.3.mlp.experts.gate_proj.weight``."""
    return ".".join(map(str, path))
