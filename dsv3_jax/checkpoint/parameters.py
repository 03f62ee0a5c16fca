"""Between the model's parameter tree and the published tensor names.

The tree carries the published names, so one rule covers all of it: prefix ``model.``, number an
MTP layer after the last layer, and split stacked experts into one tensor an expert.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from dsv3_jax.checkpoint.arrays import Arrays, LazyArray, digest
from dsv3_jax.checkpoint.names import UNUSED_SUFFIXES, copies
from dsv3_jax.config import BlockQuantization, ModelConfig, Quantization
from dsv3_jax.model import DeepSeekV3, abstract

Path = tuple[Any, ...]


class Names(NamedTuple):
    """The published tensors behind one parameter: one, or one an expert, in order."""

    names: tuple[str, ...]
    stacked: bool


def published_names(config: ModelConfig, path: Path) -> Names:
    """Published names of the parameter at ``path`` in the tree of :class:`DeepSeekV3`."""
    parts = [str(p) for p in path]
    if parts[0] == "mtp":
        parts[:2] = ["layers", str(config.num_hidden_layers + int(parts[1]))]
    if parts[-1] == "weight_scale_inv" and config.quantization is not None:
        parts[-1] = "weight" + config.quantization.scale_suffix
    if parts[0] != "lm_head":
        parts.insert(0, "model")
    if "experts" not in parts:
        return Names((".".join(parts),), stacked=False)
    at = parts.index("experts") + 1
    names = (".".join([*parts[:at], str(e), *parts[at:]]) for e in range(config.n_routed_experts))
    return Names(tuple(names), stacked=True)


def load_model(
    config: ModelConfig,
    tensors: Arrays,
    *,
    dtype: DTypeLike,
    quantization: Quantization | None,
) -> DeepSeekV3:
    """The model with a checkpoint's weights.

    Args:
      tensors: the published tensors, float8 weights beside their scales.
      dtype: of weights and activations; ``e_score_correction_bias`` and scales stay float32.
      quantization: keeps float8 weights as published; None dequantises them to ``dtype``.

    Raises:
      ValueError: a tensor or a scale is missing, has the wrong shape or dtype, or nobody asks for
        it; or an MTP layer's copy of the embedding or head differs from the original.
    """
    model = abstract(config, dtype=dtype, quantization=quantization)
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    expected = {path: published_names(config, path) for path in flat}
    _check_names(config, tensors, {n for names in expected.values() for n in names.names})
    source = _Source(config, tensors)
    # Everything is looked at before anything is read, which may take an hour.
    for path, variable in flat.items():
        names, stacked = expected[path]
        want = variable.get_value()
        for name in names:
            source.check(name, want.shape[1:] if stacked else want.shape, want.dtype)
    _check_copies(config, tensors)
    for path, variable in flat.items():
        names, stacked = expected[path]
        want = variable.get_value()
        if stacked:
            value = np.empty(want.shape, want.dtype)
            for e, name in enumerate(names):
                value[e] = source.read(name, want.dtype)
        else:
            value = source.read(names[0], want.dtype)
        flat[path] = variable.replace(jnp.asarray(value))
    return nnx.merge(graph, nnx.from_flat_state(flat.items()))


_STORED = tuple(map(np.dtype, (np.float64, np.float32, np.float16, jnp.bfloat16)))
_STORED_SCALE = (*_STORED, np.dtype(jnp.float8_e8m0fnu))


class _Source:
    """Reads tensors in the dtype the model holds them in."""

    def __init__(self, config: ModelConfig, tensors: Arrays):
        self.tensors = tensors
        self.quantization = config.quantization or BlockQuantization()

    def check(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Refuses what :meth:`read` would misread; reads no values."""
        tensor = self.tensors[name]
        if tensor.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tensor.shape}")
        scale_name = name + self.quantization.scale_suffix
        if dtype == jnp.float8_e4m3fn:
            _check_dtype(name, tensor, (np.dtype(dtype),))
        elif tensor.dtype != jnp.float8_e4m3fn or len(shape) != 2:
            is_scale = name.endswith(self.quantization.scale_suffix)
            _check_dtype(name, tensor, _STORED_SCALE if is_scale else _STORED)
            if scale_name in self.tensors:
                raise ValueError(f"{scale_name}: a scale of {name}, which is {tensor.dtype}")
        elif scale_name not in self.tensors:
            raise ValueError(f"{name}: float8 weight without its scale {scale_name}")
        else:
            scale = self.tensors[scale_name]
            _check_dtype(scale_name, scale, _STORED_SCALE)
            N, K = self.quantization.block_shape(shape[1])
            expected = (-(-shape[0] // N), -(-shape[1] // K))
            if scale.shape != expected:
                raise ValueError(f"{scale_name}: expected shape {expected}, got {scale.shape}")

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        tensor = self.tensors[name][...]
        if tensor.dtype == jnp.float8_e4m3fn and dtype != tensor.dtype:
            tensor = self._dequantized(name, tensor)
        return tensor.astype(dtype, copy=False)

    def _dequantized(self, name: str, values: np.ndarray) -> np.ndarray:
        scale = self.tensors[name + self.quantization.scale_suffix][...].astype(np.float32)
        block = self.quantization.block_shape(values.shape[1])
        rows, columns = values.shape
        spread = scale.repeat(block[0], axis=0)[:rows].repeat(block[1], axis=1)[:, :columns]
        return values.astype(np.float32) * spread


def _check_names(config: ModelConfig, tensors: Arrays, used: set[str]) -> None:
    """Everything needed is there, and everything there is needed."""
    if missing := sorted(used - set(tensors)):
        kind = "scale" if missing[0].endswith(_suffix(config)) else "tensor"
        raise ValueError(_listed(f"missing {kind}", missing))
    scales = {name + _suffix(config) for name in used}
    unknown = sorted(
        name
        for name in set(tensors) - used - scales - set(copies(config))
        if not name.endswith(UNUSED_SUFFIXES) and not _is_left_out(config, tensors, name)
    )
    if unknown:
        raise ValueError(_listed("unknown tensor", unknown))


def _check_copies(config: ModelConfig, tensors: Arrays) -> None:
    """The MTP layers' copies, where there are any, repeat their originals."""
    for name, original in copies(config).items():
        if name in tensors and digest(tensors[name]) != digest(tensors[original]):
            raise ValueError(f"{name} differs from {original}, which it should repeat")


def _is_left_out(config: ModelConfig, tensors: Arrays, name: str) -> bool:
    """Tensors of an MTP layer that is left out; eh_proj tells it from a layer of the model."""
    match = re.match(r"model\.layers\.([0-9]+)\.", name)
    return (
        match is not None
        and config.num_nextn_predict_layers == 0
        and int(match[1]) >= config.num_hidden_layers
        and f"{match[0]}eh_proj.weight" in tensors
    )


def _suffix(config: ModelConfig) -> str:
    return (config.quantization or BlockQuantization()).scale_suffix


def _check_dtype(name: str, tensor: LazyArray, expected: tuple[np.dtype, ...]) -> None:
    if tensor.dtype not in expected:
        raise ValueError(f"{name}: expected {' or '.join(map(str, expected))}, got {tensor.dtype}")


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"checkpoint: {what} {names[0]}{more}"


def published_tensors(model: DeepSeekV3) -> dict[str, np.ndarray]:
    """The model's weights under their published names, experts apart, MTP copies included."""
    config = model.config
    out: dict[str, np.ndarray] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        value = np.asarray(jax.device_get(variable.get_value()))
        names = published_names(config, path)
        out |= dict(zip(names.names, value if names.stacked else [value], strict=True))
    return out | {name: out[original] for name, original in copies(config).items()}
