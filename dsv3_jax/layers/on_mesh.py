"""A layer's code on every device of a mesh, of the parts of its arrays that lie there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from dsv3_jax.layers.linear import Linear, Weight
from dsv3_jax.logical_axes import parameter_shardings
from dsv3_jax.parameter_path import ParameterPath
from dsv3_jax.quantization import Quantization
from sharding import Layout
from sharding.fsdp import gather_parameter


def on_mesh(
    layout: Layout,
    layer: nnx.Module,
    body: Callable[..., Any],
    specs: Any,
    out_specs: Any,
    at: ParameterPath = (),
) -> Callable[..., Any]:
    """``body(layer, *args)`` inside shard_map: heads, inner widths, experts and rows are those of
    the device, and sums over what is cut are the body's affair. Of what is stored in parts, the
    body sees the whole.

    Args:
      specs: a PartitionSpec for each of ``args``, or trees of them.
      at: path of ``layer`` in the model, where its parameters' own names are not enough.
    """
    graph, state = nnx.split(layer)
    flat = list(nnx.to_flat_state(state))
    how = layer, layout.mesh, layout.rules, _quantization(layer)
    used, stored = (
        [lies[path].spec for path, _ in flat]
        for lies in (
            parameter_shardings(*how, prefix=at),
            parameter_shardings(*how, prefix=at, fsdp_axes=layout.fsdp_axes),
        )
    )

    def local(values: list[jax.Array], *args: Any) -> Any:
        values = [gather_parameter(*each) for each in zip(values, used, stored, strict=True)]
        held = [
            (path, value if isinstance(leaf, jax.Array) else leaf.replace(value))
            for (path, leaf), value in zip(flat, values, strict=True)
        ]
        return body(nnx.merge(graph, nnx.from_flat_state(held)), *args)

    spread = layout.shard_map(local, (stored, *specs), out_specs)
    values = [leaf if isinstance(leaf, jax.Array) else leaf.get_value() for _, leaf in flat]
    return lambda *args: spread(values, *args)


def shardings(module: nnx.Module, layout: Layout) -> dict[ParameterPath, NamedSharding]:
    """How the parameters of a model, or of a layer, lie on ``layout``, by their paths."""
    how = module, layout.mesh, layout.rules, _quantization(module)
    return parameter_shardings(*how, fsdp_axes=layout.fsdp_axes)


def by_rows(layout: Layout | None, name: str, module: Any, x: jax.Array, *args: Any) -> jax.Array:
    """``module(x, *args)``, on each device of its rows where the weights are stored in parts;
    elsewhere XLA divides it.

    Args:
      name: of the module in the model.
      x: [B, ...].
    """
    if layout is None or not layout.fsdp_axes:
        return module(x, *args)
    rows = layout.partition_spec(("batch",))
    return on_mesh(layout, module, lambda module, x: module(x, *args), (rows,), rows, (name,))(x)


def summed(
    linear: Linear, x: jax.Array, layout: Layout | None, axis: str, out_dtype: Any = None
) -> jax.Array:
    """``linear(x)``, where devices may each have a part of the axis that it sums over: then in
    float32, and rounded once."""
    if layout is None or layout.num_shards(axis) == 1:
        return linear(x, out_dtype)
    return layout.psum(linear(x, jnp.float32), axis).astype(out_dtype or x.dtype)


def _quantization(module: nnx.Module) -> Quantization | None:
    """Of its weights: those that have one have the same."""
    for _, part in nnx.iter_modules(module):
        if isinstance(part, Weight) and part.quantization is not None:
            return part.quantization
    return None
