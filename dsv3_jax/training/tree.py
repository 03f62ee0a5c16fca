"""The type of pytrees that hold a model's parameters."""

from __future__ import annotations

from typing import Any

Tree = Any
"""A pytree of arrays: an ``nnx.State``, or a dictionary of low-rank updates.

It is Any because beartype accepts an ``nnx.State`` neither as ``optax.Params`` nor under its own
name."""
