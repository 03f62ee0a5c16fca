"""A layer's code on every device of a mesh, of the parts of its arrays that lie there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from dsv3_jax.config import Quantization
from dsv3_jax.layers.linear import Linear, Weight
from dsv3_jax.logical_axes import Path, parameter_shardings
from sharding import Layout


def on_mesh(
    layout: Layout, layer: nnx.Module, body: Callable[..., Any], specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """``body(layer, *args)`` inside shard_map: heads, inner widths, experts and rows are those of
    the device, and sums over what is cut are the body's affair.

    Args:
      specs: a PartitionSpec for each of ``args``, or trees of them.
    """
    graph, state = nnx.split(layer)
    flat = list(nnx.to_flat_state(state))
    lies = shardings(layer, layout)

    def local(values: list[jax.Array], *args: Any) -> Any:
        held = [
            (path, value if isinstance(leaf, jax.Array) else leaf.replace(value))
            for (path, leaf), value in zip(flat, values, strict=True)
        ]
        return body(nnx.merge(graph, nnx.from_flat_state(held)), *args)

    weights = [lies[path].spec for path, _ in flat]
    spread = layout.local(local, (weights, *specs), out_specs)
    values = [leaf if isinstance(leaf, jax.Array) else leaf.get_value() for _, leaf in flat]
    return lambda *args: spread(values, *args)


def shardings(module: nnx.Module, layout: Layout) -> dict[Path, NamedSharding]:
    """How the parameters of a model, or of a layer, lie on ``layout``, by their paths."""
    return parameter_shardings(module, layout.mesh, layout.rules, _quantization(module))


def summed(
    linear: Linear, x: jax.Array, layout: Layout | None, axis: str, out_dtype: Any = None
) -> jax.Array:
    """``linear(x)``, where devices may each have a part of the axis that it sums over: then in
    float32, and rounded once."""
    if layout is None or layout.parts(axis) == 1:
        return linear(x, out_dtype)
    return layout.total(linear(x, jnp.float32), axis).astype(out_dtype or x.dtype)


def _quantization(module: nnx.Module) -> Quantization | None:
    """Of its weights: those that have one have the same."""
    for _, part in nnx.iter_modules(module):
        if isinstance(part, Weight) and part.quantization is not None:
            return part.quantization
    return None
