"""Runs a layer under shard_map: its code sees the local shard of every parameter and input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dsv3_jax.layers.linear import Linear, Weight
from dsv3_jax.layers.logical_axes import parameter_shardings
from dsv3_jax.parameter_path import ParameterPath
from dsv3_jax.quantization import Quantization
from sharding import Layout
from sharding.fsdp import gather_parameter


def on_mesh(
    layout: Layout,
    layer: nnx.Module,
    body: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    path: ParameterPath = (),
) -> Callable[..., Any]:
    """Returns a function of ``args`` that calls ``body(layer, *args)`` on every device.

    Inside ``body``, heads, hidden widths, experts and sequences are local to the device; ``body``
    must reduce over dimensions that are sharded. Parameters that are only *stored* sharded (FSDP)
    are gathered first.

    Args:
      in_specs: a PartitionSpec, or a tree of them, for each of ``args``.
      out_specs: the same for the results of ``body``.
      path: path of ``layer`` in the model. Needed only where the names of the layer's own
        parameters do not determine their logical axes.
    """
    graph, state = nnx.split(layer)
    parameters = list(nnx.to_flat_state(state))
    quantization = _quantization(layer)

    def specs(fsdp_axes: tuple[str, ...]) -> list[PartitionSpec]:
        shardings = parameter_shardings(
            layer, layout.mesh, layout.rules, quantization, prefix=path, fsdp_axes=fsdp_axes
        )
        return [shardings[name].spec for name, _ in parameters]

    compute_specs, storage_specs = specs(()), specs(layout.fsdp_axes)

    def local_body(values: list[jax.Array], *args: Any) -> Any:
        local_state = [
            (name, _with_value(variable, gather_parameter(value, compute_spec, storage_spec)))
            for (name, variable), value, compute_spec, storage_spec in zip(
                parameters, values, compute_specs, storage_specs, strict=True
            )
        ]
        return body(nnx.merge(graph, nnx.from_flat_state(local_state)), *args)

    sharded_body = layout.shard_map(local_body, (storage_specs, *in_specs), out_specs)
    values = [_value(variable) for _, variable in parameters]
    return lambda *args: sharded_body(values, *args)


def stored_shardings(module: nnx.Module, layout: Layout) -> dict[ParameterPath, NamedSharding]:
    """Returns the sharding in which each parameter of a model or layer is stored, by its path."""
    return parameter_shardings(
        module, layout.mesh, layout.rules, _quantization(module), fsdp_axes=layout.fsdp_axes
    )


def batch_sharded(
    layout: Layout | None, name: str, module: Any, x: jax.Array, *args: Any
) -> jax.Array:
    """Returns ``module(x, *args)`` for ``x`` [B, T, ...], whose tokens may be sharded. Where
    parameters are stored sharded, each device gathers those of the model's attribute ``name`` and
    computes its own tokens. Otherwise XLA partitions the operation."""
    if layout is None or not layout.fsdp_axes:
        return module(x, *args)
    batch = layout.sequences_spec(x.shape[1])
    apply = on_mesh(layout, module, lambda module, x: module(x, *args), (batch,), batch, (name,))
    return apply(x)


def apply(linear: Any, x: jax.Array, out_dtype: Any = None) -> jax.Array:
    """Returns ``linear(x)`` in ``out_dtype``, by default the dtype of ``linear``'s result. A module
    that replaces a :class:`Linear` need not take the dtype."""
    if isinstance(linear, Linear) or out_dtype is None:
        return linear(x) if out_dtype is None else linear(x, out_dtype)
    return linear(x).astype(out_dtype)


def sharded_linear(
    linear: Any, x: jax.Array, layout: Layout | None, axis: str, out_dtype: Any = None
) -> jax.Array:
    """Returns ``linear(x)`` where the input dimension of ``linear`` has the logical axis ``axis``.
    If devices share that axis, the partial results are summed in float32 and rounded once."""
    if layout is None or layout.num_shards(axis) == 1:
        return apply(linear, x, out_dtype)
    return layout.psum(linear(x, jnp.float32), axis).astype(out_dtype or x.dtype)


def _value(variable: Any) -> jax.Array:
    """Returns the array of a Variable. Arrays that are not parameters have no Variable."""
    return variable if isinstance(variable, jax.Array) else variable.get_value()


def _with_value(variable: Any, value: jax.Array) -> Any:
    return value if isinstance(variable, jax.Array) else variable.replace(value)


def _quantization(module: nnx.Module) -> Quantization | None:
    """Returns the quantization of a module's weights. All quantised weights have the same one."""
    for _, part in nnx.iter_modules(module):
        if isinstance(part, Weight) and part.quantization is not None:
            return part.quantization
    return None
