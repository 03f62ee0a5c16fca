"""What travels between devices while a layer runs, read from the compiled program."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv3_jax.kv_cache import PAGE_SIZE, LatentKVCache
from dsv3_jax.layers.attention import LayerCache
from dsv3_jax.layers.rope import rotation
from dsv3_jax.model import DeepSeekV3

COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"


class Collective(NamedTuple):
    name: str
    """XLA's: one of ``COLLECTIVES``."""
    groups: tuple[tuple[int, ...], ...]
    """Devices that exchange with each other, numbered in the mesh's order."""


def layer_collectives(model: DeepSeekV3, layer: int) -> list[Collective]:
    """Of one decode step of a layer, a row a device or micro-batch, as XLA compiles it.

    Raises:
      ValueError: a model that lies on no mesh.
    """
    if model.layout is None:
        raise ValueError("model: expected one that was loaded with a layout, got one without")
    c, layout = model.config, model.layout
    rows = math.lcm(layout.mesh.size, layout.batch_multiple)
    x, valid = jnp.zeros((rows, 1, c.hidden_size), model.dtype), jnp.ones((rows, 1), bool)
    empty = LatentKVCache.init(c, rows, PAGE_SIZE, dtype=model.dtype, layout=layout)
    per_row = x, empty.block_tables, empty.lengths, valid
    x, *rest = jax.device_put(per_row, layout.sharding(("batch",)))
    cache = LayerCache(empty.pages[layer], *rest)
    graph, state = nnx.split(model.layers[layer])

    @jax.jit
    def run(state: nnx.State, x: jax.Array, cache: LayerCache) -> tuple[jax.Array, jax.Array]:
        turn = rotation(c, cache.starts[:, None])
        return nnx.merge(graph, state).extend(x, turn, cache, "absorbed")[:2]

    text = run.lower(state, x, cache).compile().as_text() or ""
    return read_collectives(text, layout.mesh.size)


def read_collectives(text: str, devices: int) -> list[Collective]:
    """Those of a compiled program's text."""
    begin = re.compile(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(")
    return [
        Collective(found[1], _groups(line, devices))
        for line in text.splitlines()
        if (found := begin.search(line))
    ]


def _groups(line: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """XLA lists the groups, ``{{0,1},{2,3}}``, or says how to cut and turn the list of all devices,
    ``[2,2]<=[2,2]T(1,0)``; what it says nothing of is among all."""
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]+\})\}", line):
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    cut = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if not cut:
        return (tuple(range(devices)),)
    places = np.arange(devices).reshape(_numbers(cut[2]))
    turned = places.transpose(_numbers(cut[3])) if cut[3] else places
    return tuple(map(tuple, turned.reshape(_numbers(cut[1])).tolist()))


def _numbers(listed: str) -> tuple[int, ...]:
    return tuple(map(int, listed.split(",")))
