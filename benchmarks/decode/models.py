"""Benchmark models with published widths and random weights of a sensible scale."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from dsv3_jax import presets
from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import abstract_model
from dsv3_jax.layers.on_mesh import stored_shardings
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import QUANTIZATIONS
from sharding import Layout

SHAPES = {
    "moonlight-16b": presets.MOONLIGHT_16B,
    # As much of DeepSeek-V3 as fits on one GPU in float8: 94.5 B parameters, and the MTP layer.
    "v3-slice": dataclasses.replace(
        presets.DEEPSEEK_V3, num_hidden_layers=9, first_k_dense_replace=1
    ),
    # The same of DeepSeek-V3.2, with room for a long cache, and these layers with dense attention.
    "v32-slice": dataclasses.replace(
        presets.DEEPSEEK_V3_2, num_hidden_layers=8, first_k_dense_replace=1
    ),
    "v32-slice-dense": dataclasses.replace(
        presets.DEEPSEEK_V3_1, num_hidden_layers=8, first_k_dense_replace=1
    ),
    # All 60 layers and 236 B parameters, which fit on one H200 in int4.
    "deepseek-v2": presets.DEEPSEEK_V2,
}

HELP = f"{', '.join(SHAPES)} or a config.json"

WEIGHTS = QUANTIZATIONS

FEED_FORWARD = "separate", "mosaic_gpu"
"""Names that ``DeepSeekV3.use_feed_forward`` takes."""

Module = TypeVar("Module", bound=nnx.Module)

# Root mean square of random integers. The most negative value is replaced by 0: with a mean of -0.5
# all matrices would share a direction, along which activations grow until all tokens are routed to
# the same experts.
INT8_RMS = math.sqrt(sum(x * x for x in range(-127, 128)) / 256)
INT4_RMS = math.sqrt(sum(x * x for x in range(-7, 8)) / 16)


def config(name: str) -> ModelConfig:
    """Returns a configuration of ``SHAPES``, or reads a checkpoint's config.json.

    Raises:
      ValueError: ``name`` is neither, or the file is not a valid configuration.
    """
    return SHAPES.get(name) or ModelConfig.from_hf(Path(name))


def shapes(config: ModelConfig, weights: str, dtype: DTypeLike, *, mtp: bool) -> DeepSeekV3:
    """Returns an abstract model: shapes and dtypes without values."""
    if not mtp:
        config = dataclasses.replace(config, num_nextn_predict_layers=0)
    return abstract_model(config, dtype=dtype, quantization=WEIGHTS[weights])


def random_model(model: Module, layout: Layout | None = None) -> Module:
    """Fills an abstract model, or a module of one, with random values generated on the device.

    With ``layout``, each device generates its own shards. Every matmul of a normalised input has a
    variance of about 1, so that the router uses all experts, and activations stay in the range
    where float8 and bfloat16 are accurate.
    """
    graph, state = nnx.split(model)
    leaves = list(nnx.to_flat_state(state))
    keys = iter(jax.random.split(jax.random.key(0, impl="rbg"), len(leaves)))
    shardings_by_path = {} if layout is None else stored_shardings(model, layout)
    filled = []
    for path, leaf, kind, std in _kinds(leaves):
        arguments = next(keys), kind, leaf.shape, jnp.dtype(leaf.dtype), std
        values = (
            _fill(*arguments) if layout is None else _spread(*arguments, shardings_by_path[path])
        )
        filled.append((path, leaf.replace(values)))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _kinds(leaves: list[Any]) -> Iterator[tuple[Any, Any, str, float]]:
    """Yields (path, leaf, kind of values, standard deviation or constant value)."""
    dtypes = {path: jnp.dtype(leaf.dtype) for path, leaf in leaves}
    shapes = {path: leaf.shape for path, leaf in leaves}
    for path, leaf in leaves:
        name, owner = str(path[-1]), str(path[-2])
        if "norm" in owner:
            yield path, leaf, "constant", 1.0
        elif name == "e_score_correction_bias":
            yield path, leaf, "constant", 0.0
        elif name in ("weight_scale_inv", "weight_scale"):
            weight = (*path[:-1], "weight")
            packed = dtypes[weight] == jnp.uint8
            columns = shapes[weight][-1] * (2 if packed else 1)
            rms = INT4_RMS if packed else INT8_RMS if dtypes[weight] == jnp.int8 else 1.0
            yield path, leaf, "constant", 1 / math.sqrt(columns) / rms
        elif leaf.dtype in (jnp.int8, jnp.uint8):
            yield path, leaf, "integers", 0.0
        else:
            float8 = leaf.dtype == jnp.float8_e4m3fn
            is_embedding = owner == "embed_tokens"
            std = 1.0 if float8 or is_embedding else 1 / math.sqrt(leaf.shape[-1])
            yield path, leaf, "normal", std


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _fill(key: jax.Array, kind: str, shape: tuple[int, ...], dtype: Any, std: float) -> jax.Array:
    if kind == "constant":
        return jnp.full(shape, std, dtype)
    if (
        len(shape) == 3
    ):  # one matrix at a time, because a stack's random bits take more memory than the stack

        def one(key: jax.Array) -> jax.Array:
            return _fill(key, kind, shape[1:], dtype, std)

        return jax.lax.map(one, jax.random.split(key, shape[0]))
    if kind == "integers":
        return (random_int4 if dtype == jnp.uint8 else random_int8)(key, shape)
    return (jax.random.normal(key, shape, jnp.bfloat16) * std).astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _spread(
    key: jax.Array,
    kind: str,
    shape: tuple[int, ...],
    dtype: Any,
    std: float,
    sharding: NamedSharding,
) -> jax.Array:
    """Calls :func:`_fill` under shard_map. Each device generates its own shard."""
    parts = [(part,) if isinstance(part, str) else part or () for part in sharding.spec]
    axes = tuple(axis for part in parts for axis in part)

    def own(key: jax.Array) -> jax.Array:
        if axes:
            key = jax.random.fold_in(key, jax.lax.axis_index(axes))
        return _fill(key, kind, sharding.shard_shape(shape), dtype, std)

    spread = jax.shard_map(
        own, mesh=sharding.mesh, in_specs=PartitionSpec(), out_specs=sharding.spec, check_vma=False
    )
    return spread(key)


def random_int8(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns random int8 from -127 to 127."""
    bits = jax.random.bits(key, shape, jnp.uint8)
    return jax.lax.bitcast_convert_type(jnp.where(bits == 128, 0, bits), jnp.int8)


def random_int4(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns random int4 from -7 to 7, two of them packed in each uint8."""
    bits = jax.random.bits(key, shape, jnp.uint8)
    low, high = bits & 15, bits & 240
    return jnp.where(low == 8, 0, low) | jnp.where(high == 128, 0, high)
