"""Transfer of weights between published tensors and the parameters of a model."""

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

from dsv3_jax.checkpoint.arrays import Arrays, LazyArray, columns_per_element, pieces
from dsv3_jax.checkpoint.check import (
    check_copy,
    check_tensors,
    is_uncounted_mtp_tensor,
    without_plain_modules,
)
from dsv3_jax.checkpoint.formats import check_finite, check_scale, dequantize
from dsv3_jax.checkpoint.reader import NUMPY
from dsv3_jax.checkpoint.tensor_table import (
    TensorNames,
    copies,
    is_selecting,
    published_tensor_names,
)
from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import abstract_model
from dsv3_jax.layers.logical_axes import check_layout, parameter_shardings
from dsv3_jax.layers.moe import MoE, Replicas
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.parameter_path import ParameterPath
from dsv3_jax.quantization import BlockQuantization, Quantization
from sharding import Layout, Placement
from sharding.distributed import host_values

_THREADS = 8  # for reading and dequantizing; each has one expert or one piece of a matrix in memory

Index = tuple[slice, ...]

_LARGEST = np.float32(448)  # of float8


class ParameterReader:
    """Reads parts of published tensors that :func:`~dsv3_jax.checkpoint.check.check_tensors`
    accepts, and dequantizes them if the model is not quantized."""

    def __init__(self, config: ModelConfig, tensors: Arrays):
        self.tensors = tensors
        # The default has no effect. Without quantization in the config, no tensor is a scale and
        # none is quantized.
        self.quantization = config.quantization or BlockQuantization()
        self.suffix = self.quantization.scale_suffix
        self.dtype = NUMPY[self.quantization.stored(2, 2)[1]]

    def read(self, name: str, index: Index, out: np.ndarray) -> None:
        """Fills ``out`` with the part of a tensor at ``index``. A quantized weight that is read as
        another dtype is the exact product of value and scale, rounded once.

        Raises:
          ValueError: a scale is not finite, is negative, or is 0 for a block that is not zero; or a
            tensor that selects experts or keys has NaN or infinity.
        """
        tensor = self.tensors[name]
        with np.errstate(over="ignore"):  # a product with a scale, which the check refuses
            if name.endswith(self.suffix):
                out[...] = self._scale(name.removesuffix(self.suffix), index)
            elif tensor.dtype == self.dtype and out.dtype != tensor.dtype:
                out[...] = self._dequantized(name, index, out.dtype)
            else:
                out[...] = tensor[index]
            if is_selecting(name):
                is_scale = name.endswith(self.suffix)
                check_finite(name, out.astype(np.float32) * _LARGEST if is_scale else out)

    def _dequantized(self, name: str, index: Index, dtype: np.dtype) -> np.ndarray:
        tensor = self.tensors[name]
        per_element = columns_per_element(tensor.dtype)
        N, K = self._block_shape(tensor)
        rows, columns = index
        stored = slice(columns.start // per_element, -(-columns.stop // per_element))
        first, last = stored.start * per_element, stored.stop * per_element
        blocks = (slice(rows.start // N, -(-rows.stop // N)), slice(first // K, -(-last // K)))
        scale = self._scale(name, blocks)
        offset = (rows.start % N, first % K)
        dense = dequantize(tensor[rows, stored], scale, (N, K), dtype, offset)
        return dense[:, columns.start - first : columns.stop - first]

    def _scale(self, weight: str, blocks: Index) -> np.ndarray:
        """Reads and checks the stored scales of these blocks of ``weight``."""
        name = weight + self.suffix
        scale = self.tensors[name][blocks]
        tensor = self.tensors[weight]
        first_block = (blocks[0].start, blocks[1].start)
        check_scale(name, scale, tensor, self._block_shape(tensor), first_block)
        return scale

    def _block_shape(self, tensor: LazyArray) -> tuple[int, int]:
        """Returns the rows and columns per scale of a stored matrix."""
        columns = tensor.shape[1] * columns_per_element(tensor.dtype)
        return self.quantization.block_shape(columns)


def load_model(
    config: ModelConfig,
    tensors: Arrays,
    *,
    dtype: DTypeLike,
    quantization: Quantization | None,
    layout: Layout | None = None,
    placement: Placement | None = None,
) -> DeepSeekV3:
    """Creates a model with the weights of a checkpoint.

    The host has at most two parameters in memory at once.

    Args:
      tensors: published tensors, including the scales of quantized weights.
      dtype: dtype of weights and activations. ``e_score_correction_bias`` and scales are float32.
      quantization: keeps weights as stored. None dequantizes them to ``dtype``.
      layout: sharding of the parameters. Each process reads only the shards of its own devices, and
        reads a replicated shard once. None for the default device.
      placement: assignment of experts to slots, as in :meth:`DeepSeekV3.place_experts`.

    Raises:
      ValueError: ``layout`` cannot shard a parameter or run a layer; ``placement`` does not fit the
        layers, experts or devices; a tensor is missing, unknown, or has the wrong shape or dtype;
        an MTP layer's copy of embedding or head differs from its original; a scale has an
        impossible value; or a tensor that selects experts or keys has NaN or infinity.
    """
    model_config = without_plain_modules(config)  # the list may be long, and no layer reads it
    model = abstract_model(model_config, dtype=dtype, quantization=quantization)
    experts = {} if placement is None else _add_expert_slots(model, placement, layout)
    shardings = {}
    if layout is not None:
        shardings = parameter_shardings(
            model, layout.mesh, layout.rules, quantization, fsdp_axes=layout.fsdp_axes
        )
        check_layout(config, layout, None if placement is None else placement.phy2log.shape[1])
    graph, state = nnx.split(model)
    parameters = dict(nnx.to_flat_state(state))
    names = {path: published_tensor_names(config, path) for path in parameters}
    for path, expert_of_slot in experts.items():
        slot_names = tuple(names[path].names[expert] for expert in expert_of_slot)
        names[path] = TensorNames(slot_names, stacked=True)
    # Everything is checked before values are read, which may take an hour.
    counted = {
        name: tensor
        for name, tensor in tensors.items()
        if not is_uncounted_mtp_tensor(config, tensors, name)
    }
    check_tensors(config, counted)
    for copy, original in copies(config).items():
        if copy in tensors:
            check_copy(tensors, copy, original)
    reader = ParameterReader(config, tensors)
    with ThreadPoolExecutor(_THREADS) as threads:
        previous = None
        # Tensors that select come first, because reading may refuse their values.
        for path in sorted(parameters, key=lambda path: not is_selecting(names[path].names[0])):
            variable = parameters[path]
            abstract_value = variable.get_value()
            read = functools.partial(_read_part, threads, reader, names[path], abstract_value.dtype)
            value = _device_array(read, abstract_value.shape, shardings.get(path))
            parameters[path] = variable.replace(value)
            # Reading may be faster than the transfers. Without waiting, the checkpoint would
            # accumulate in host memory.
            jax.block_until_ready(previous)
            previous = value
    model = nnx.merge(graph, nnx.from_flat_state(parameters.items()))
    if placement is not None:
        tables = zip(placement.log2phy, placement.logcnt, strict=True)
        for moe, layer_tables in zip(model.moe_layers(), tables, strict=True):
            moe.replicas = nnx.data(Replicas(*layer_tables))
    if layout is not None:
        model.lay_out(layout)
    return model


def published_tensors(model: DeepSeekV3) -> dict[str, np.ndarray]:
    """Returns the weights under their published names, with separate experts and MTP copies, and
    without placement tables and precomputed projections.

    A model with placed experts gives its logical ones, each from its first slot, so that the
    tensors are the same as without a placement. If weights are sharded over several processes, all
    must call this function, and each receives all tensors.
    """
    config = model.config
    flat = dict(nnx.to_flat_state(nnx.state(model)))
    tensors: dict[str, np.ndarray] = {}
    for path, variable in flat.items():
        if not isinstance(variable, nnx.Variable):
            continue
        value = np.asarray(host_values(variable.get_value()))
        names, stacked = published_tensor_names(config, path)
        if not stacked:
            tensors[names[0]] = value
            continue
        slots = flat.get((*path[: path.index("experts")], "replicas", "log2phy"))
        first_slots = range(len(value)) if slots is None else np.asarray(slots)[:, 0]
        tensors |= {name: value[slot] for name, slot in zip(names, first_slots, strict=True)}
    return tensors | {copy: tensors[original] for copy, original in copies(config).items()}


def _add_expert_slots(
    model: DeepSeekV3, placement: Placement, layout: Layout | None
) -> dict[ParameterPath, np.ndarray]:
    """Gives the expert parameters of an abstract model one entry per slot of ``placement``. Returns
    the expert of each slot, by the path of the parameter."""
    model.check_placement(placement, layout)
    phy2log = np.asarray(placement.phy2log)
    moe_layers = [
        (group, index)
        for group, layers in (("layers", model.layers), ("mtp", model.mtp))
        for index, layer in enumerate(layers)
        if isinstance(layer.mlp, MoE)
    ]
    experts = {}
    for (group, index), moe, of_slot in zip(moe_layers, model.moe_layers(), phy2log, strict=True):
        for path, parameter in nnx.to_flat_state(nnx.state(moe.experts)):
            value = parameter.get_value()
            shape = (len(of_slot), *value.shape[1:])
            parameter.set_value(jax.ShapeDtypeStruct(shape, value.dtype))
            experts[group, index, "mlp", "experts", *path] = of_slot
    return experts


def _read_part(
    threads: ThreadPoolExecutor,
    reader: ParameterReader,
    names: TensorNames,
    dtype: np.dtype,
    index: Index,
) -> np.ndarray:
    """Reads the part of a parameter at ``index``, in parallel by expert and by piece."""
    out = np.empty([axis.stop - axis.start for axis in index], dtype)
    if names.stacked:
        selected = names.names[index[0]]
        parts = [(name, index[1:], part) for name, part in zip(selected, out, strict=True)]
    else:
        parts = [(names.names[0], index, out)]
    jobs = [
        (name, (slice(at[0].start + rows.start, at[0].start + rows.stop), *at[1:]), part[rows])
        for name, at, part in parts
        for rows in pieces(part.shape)
    ]
    for _ in threads.map(lambda job: reader.read(*job), jobs):
        pass  # iterating raises the exceptions of the threads
    return out


def _device_array(
    read: Callable[[Index], np.ndarray], shape: tuple[int, ...], sharding: NamedSharding | None
) -> jax.Array:
    """Creates an array on its devices. A shard with several replicas is read once."""
    if sharding is None:
        return jnp.asarray(read(tuple(slice(0, size) for size in shape)))
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(
            axis.indices(size)[:2] for axis, size in zip(index or (), shape, strict=True)
        )
        devices.setdefault(bounds, []).append(device)
    shards: list[jax.Array] = []
    for bounds, replicas in devices.items():
        part = read(tuple(slice(*axis) for axis in bounds))
        shards += [jax.device_put(part, device) for device in replicas]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)
