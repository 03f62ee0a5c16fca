"""Collectives that a layer's compiled program runs."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE, LatentKVCache
from dsv3_jax.layers.paged_cache import LayerCache, LayerPages
from dsv3_jax.layers.rope import rotation_at
from dsv3_jax.model import DeepSeekV3

COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"


class Collective(NamedTuple):
    """One collective operation of a compiled program."""

    name: str
    """XLA's name of the operation, one of ``COLLECTIVES``."""
    groups: tuple[tuple[int, ...], ...]
    """Groups of devices that communicate with each other. Devices are numbered in mesh order."""


def layer_collectives(model: DeepSeekV3, layer: int) -> list[Collective]:
    """Compiles one decode step of a layer and returns its collectives.

    The batch has one sequence per device, or more if micro-batches need them.

    Raises:
      ValueError: the model has no layout.
    """
    if model.layout is None:
        raise ValueError("model: expected one that was loaded with a layout, got one without")
    c, layout = model.config, model.layout
    B = math.lcm(layout.mesh.size, layout.batch_multiple)
    x, valid = jnp.zeros((B, 1, c.hidden_size), model.dtype), jnp.ones((B, 1), bool)
    empty = LatentKVCache.init(model.cache_spec(), B, DEFAULT_PAGE_SIZE, layout=layout)
    per_sequence = x, empty.block_tables, empty.lengths, valid
    x, *rest = jax.device_put(per_sequence, layout.sharding(("batch",)))
    cache = LayerCache(empty.pool.layers[layer], *rest)
    graph, state = nnx.split(model.layers[layer])

    @jax.jit
    def step(state: nnx.State, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, LayerPages]:
        rotation = rotation_at(c, cache.starts[:, None])
        return nnx.merge(graph, state).extend(x, rotation, cache, "absorbed")[:2]

    hlo = step.lower(state, x, cache).compile().as_text() or ""
    return read_collectives(hlo, layout.mesh.size)


def read_collectives(hlo: str, num_devices: int) -> list[Collective]:
    """Returns the collectives in the text of a compiled program."""
    operation = re.compile(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(")
    return [
        Collective(match[1], _groups(line, num_devices))
        for line in hlo.splitlines()
        if (match := operation.search(line))
    ]


def _groups(line: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of the collective in one line of HLO.

    XLA either lists the groups, ``{{0,1},{2,3}}``, or gives a shape and a transposition of the list
    of all devices, ``[2,2]<=[2,2]T(1,0)``. Without either, all devices are one group.
    """
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]+\})\}", line):
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if not iota:
        return (tuple(range(num_devices)),)
    devices = np.arange(num_devices).reshape(_numbers(iota[2]))
    transposed = devices.transpose(_numbers(iota[3])) if iota[3] else devices
    return tuple(map(tuple, transposed.reshape(_numbers(iota[1])).tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))
