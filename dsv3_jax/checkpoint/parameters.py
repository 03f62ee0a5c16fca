"""Between the model's parameter tree and the published tensor names.

The tree carries the published names, so one rule covers all of it: prefix ``model.``, number an
MTP layer after the last layer, and split stacked experts into one tensor an expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from dsv3_jax.checkpoint.arrays import Arrays, digest, pieces
from dsv3_jax.checkpoint.check import check_tensors, is_left_out
from dsv3_jax.checkpoint.parameter_names import TensorNames, published_tensor_names
from dsv3_jax.checkpoint.parameter_reader import Index, ParameterReader
from dsv3_jax.checkpoint.tensor_table import UNUSED_SUFFIXES, copies
from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import abstract_model
from dsv3_jax.layers.logical_axes import check_layout, parameter_shardings
from dsv3_jax.layers.moe import MoE, Replicas
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.parameter_path import ParameterPath
from dsv3_jax.quantization import BlockQuantization, Quantization
from sharding import Layout, Placement
from sharding.distributed import host_values


def load_model(
    config: ModelConfig,
    tensors: Arrays,
    *,
    dtype: DTypeLike,
    quantization: Quantization | None,
    layout: Layout | None = None,
    placement: Placement | None = None,
) -> DeepSeekV3:
    """The model with a checkpoint's weights; the host never holds more than two parameters.

    Args:
      tensors: the published tensors, quantised weights beside their scales.
      dtype: of weights and activations; ``e_score_correction_bias`` and scales stay float32.
      quantization: keeps weights as stored; None dequantises them to ``dtype``.
      layout: where parameters go; each device's part alone is read, and once for all devices of
        this process that hold it. None: the default device.
      placement: as :meth:`DeepSeekV3.place_experts` takes it.

    Raises:
      ValueError: a parameter cannot lie, or a layer not run, as ``layout`` says; ``placement`` is
        of other layers, experts or devices; a tensor or a scale is missing, has the wrong shape or
        dtype, or nobody asks for it; an MTP layer's copy of the embedding or head differs from the
        original; or a scale makes no sense.
    """
    model = abstract_model(config, dtype=dtype, quantization=quantization)
    placed = {} if placement is None else _make_places(model, placement, layout)
    shardings = {}
    if layout is not None:
        shardings = parameter_shardings(
            model, layout.mesh, layout.rules, quantization, fsdp_axes=layout.fsdp_axes
        )
        check_layout(config, layout, None if placement is None else placement.phy2log.shape[1])
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    expected = {path: published_tensor_names(config, path) for path in flat}
    for path, experts in placed.items():
        expected[path] = TensorNames(tuple(expected[path].names[e] for e in experts), stacked=True)
    _check_names(config, tensors, {n for names in expected.values() for n in names.names})
    source = ParameterReader(config, tensors)
    # Everything is looked at before anything is read, which may take an hour.
    for path, variable in flat.items():
        names, stacked = expected[path]
        want = variable.get_value()
        for name in names:
            source.check(name, want.shape[1:] if stacked else want.shape, want.dtype)
    _check_copies(config, tensors)
    check_tensors(config, {n: t for n, t in tensors.items() if not is_left_out(config, tensors, n)})
    with ThreadPoolExecutor(_THREADS) as threads:
        on_its_way = None
        for path, variable in flat.items():
            want = variable.get_value()
            read = functools.partial(_part, threads, source, expected[path], want.dtype)
            value = _placed(read, want.shape, shardings.get(path))
            flat[path] = variable.replace(value)
            # Or else reading might outrun the transfers, and the checkpoint pile up between them.
            jax.block_until_ready(on_its_way)
            on_its_way = value
    model = nnx.merge(graph, nnx.from_flat_state(flat.items()))
    if placement is not None:
        tables = zip(placement.log2phy, placement.logcnt, strict=True)
        for moe, of_layer in zip(model.moe_layers(), tables, strict=True):
            moe.replicas = nnx.data(Replicas(*of_layer))
    if layout is not None:
        model.lay_out(layout)
    return model


def _make_places(
    model: DeepSeekV3, placement: Placement, layout: Layout | None
) -> dict[ParameterPath, np.ndarray]:
    """Widens the abstract model's stacks of experts; by path, the expert at each place."""
    model.check_placement(placement, layout)
    phy2log = np.asarray(placement.phy2log)
    at = [
        (name, i)
        for name, layers in (("layers", model.layers), ("mtp", model.mtp))
        for i, layer in enumerate(layers)
        if isinstance(layer.mlp, MoE)
    ]
    places = {}
    for (name, i), moe, experts in zip(at, model.moe_layers(), phy2log, strict=True):
        for path, parameter in nnx.to_flat_state(nnx.state(moe.experts)):
            want = parameter.get_value()
            shape = (len(experts), *want.shape[1:])
            parameter.set_value(jax.ShapeDtypeStruct(shape, want.dtype))
            places[name, i, "mlp", "experts", *path] = experts
    return places


_THREADS = 8  # that read and dequantise; each holds an expert or a piece of a matrix


def _part(
    threads: ThreadPoolExecutor,
    source: ParameterReader,
    names: TensorNames,
    dtype: np.dtype,
    index: Index,
) -> np.ndarray:
    """The part of a parameter at ``index``, expert by expert and piece by piece."""
    out = np.empty([along.stop - along.start for along in index], dtype)
    if names.stacked:
        chosen = names.names[index[0]]
        parts = [(name, index[1:], part) for name, part in zip(chosen, out, strict=True)]
    else:
        parts = [(names.names[0], index, out)]
    jobs = [
        (name, (slice(at[0].start + rows.start, at[0].start + rows.stop), *at[1:]), part[rows])
        for name, at, part in parts
        for rows in pieces(part.shape)
    ]
    for _ in threads.map(lambda job: source.read(*job), jobs):
        pass  # what a thread raises comes up here
    return out


def _placed(
    read: Callable[[Index], np.ndarray], shape: tuple[int, ...], sharding: NamedSharding | None
) -> jax.Array:
    """The array on its devices; devices that hold the same part share one reading of it."""
    if sharding is None:
        return jnp.asarray(read(tuple(slice(0, size) for size in shape)))
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(
            along.indices(size)[:2] for along, size in zip(index or (), shape, strict=True)
        )
        devices.setdefault(bounds, []).append(device)
    shards: list[jax.Array] = []
    for bounds, holders in devices.items():
        part = read(tuple(slice(*along) for along in bounds))
        shards += [jax.device_put(part, device) for device in holders]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _check_names(config: ModelConfig, tensors: Arrays, used: set[str]) -> None:
    """Everything needed is there, and everything there is needed."""
    if missing := sorted(used - set(tensors)):
        kind = "scale" if missing[0].endswith(_suffix(config)) else "tensor"
        raise ValueError(_listed(f"missing {kind}", missing))
    scales = {name + _suffix(config) for name in used}
    unknown = sorted(
        name
        for name in set(tensors) - used - scales - set(copies(config))
        if not name.endswith(UNUSED_SUFFIXES) and not is_left_out(config, tensors, name)
    )
    if unknown:
        raise ValueError(_listed("unknown tensor", unknown))


def _check_copies(config: ModelConfig, tensors: Arrays) -> None:
    """The MTP layers' copies, where there are any, repeat their originals."""
    for name, original in copies(config).items():
        if name in tensors and digest(tensors[name]) != digest(tensors[original]):
            raise ValueError(f"{name} differs from {original}, which it should repeat")


def _suffix(config: ModelConfig) -> str:
    return (config.quantization or BlockQuantization()).scale_suffix


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"checkpoint: {what} {names[0]}{more}"


def published_tensors(model: DeepSeekV3) -> dict[str, np.ndarray]:
    """The model's weights under their published names, experts apart, MTP copies included.

    A model with placed experts gives its logical ones, each from its first slot: the same tensors
    as without a placement. What a model holds beside its weights, such as placement tables and
    precomputed projections, is left out.

    Every process gets all of it. Where weights lie on several processes, all must call this alike.
    """
    config = model.config
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    out: dict[str, np.ndarray] = {}
    for path, variable in flat.items():
        if not isinstance(variable, nnx.Variable):
            continue
        value = np.asarray(host_values(variable.get_value()))
        names = published_tensor_names(config, path)
        if not names.stacked:
            out[names.names[0]] = value
            continue
        slots = flat.get((*path[: path.index("experts")], "replicas", "log2phy"))
        first = range(len(value)) if slots is None else np.asarray(slots)[:, 0]
        out |= {name: value[slot] for name, slot in zip(names.names, first, strict=True)}
    return out | {name: out[original] for name, original in copies(config).items()}
