"""What travels between devices while a layer runs, counted in the compiled program."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
from flax import nnx

from dsv3_jax.kv_cache import PAGE_SIZE, LatentKVCache
from dsv3_jax.layers.attention import LayerCache
from dsv3_jax.layers.rope import rotation
from dsv3_jax.model import DeepSeekV3

COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"


def layer_collectives(model: DeepSeekV3, layer: int) -> dict[str, int]:
    """Of one decode step of a layer as XLA compiles it: name -> how many. Rows: one a device or
    micro-batch.

    Raises:
      ValueError: a model that lies on no mesh.
    """
    if model.layout is None:
        raise ValueError("model: expected one that was loaded with a layout, got one without")
    c, layout = model.config, model.layout
    rows = math.lcm(layout.mesh.size, layout.row_multiple)
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
    counts = {name: len(re.findall(rf" {name}(-start)?\(", text)) for name in COLLECTIVES}
    return {name: count for name, count in counts.items() if count}
