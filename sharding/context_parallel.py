"""Context parallelism: the tokens of each sequence are sharded over devices, in order.

Device i of N has the half chunks 2i and 2i+1 of 2N. In causal attention later queries see more
keys, so that the last device would compute almost twice the mean. Therefore devices exchange
queries first: device i computes attention of the half chunks i and 2N-1-i, which together see as
many keys as those of any other device (the order of Llama 3, arXiv 2407.21783, section 3.3.2).
Keys are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from sharding.fsdp import gather
from sharding.layout import Layout

Queries = Any
"""A tree of arrays [B, T, ...] of consecutive tokens."""


def gather_tokens(layout: Layout, x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "B S *rest"]:
    """Returns the tokens of all devices that share a sequence, in order. Runs inside shard_map. The
    gradient is one reduce-scatter, which sums in float32."""
    return gather(1, layout.mesh_axes("tokens"), x)


def map_balanced(
    layout: Layout, function: Callable[[Queries, jax.Array], jax.Array], queries: Queries
) -> Shaped[Array, "B T *rest"]:
    """Returns ``function(queries, start)`` for this device's tokens, computed by the devices in
    balance. ``function`` is called twice, with half of a device's tokens and the position of the
    first of them in the sequence. Runs inside shard_map.

    Raises:
      ValueError: a device has an odd number of tokens.
    """
    axes, devices = layout.mesh_axes("tokens"), layout.num_shards("tokens")
    tokens = jax.tree.leaves(queries)[0].shape[1]
    if tokens % 2:
        raise ValueError(f"queries: expected an even number per device, got {tokens}")
    device, last = layout.shard_index("tokens"), 2 * devices - 1
    halves = []
    for parity in (0, 1):
        chunks = range(parity, 2 * devices, 2)  # the chunk of each device
        moves = [(i, min(chunk, last - chunk)) for i, chunk in enumerate(chunks)]
        half = slice(parity * tokens // 2, (1 + parity) * tokens // 2)
        moved = jax.tree.map(lambda x, h=half, m=moves: lax.ppermute(x[:, h], axes, m), queries)
        chunk = jnp.where(device % 2 == parity, device, last - device)
        result = function(moved, chunk * (tokens // 2))
        halves.append(lax.ppermute(result, axes, [(to, i) for i, to in moves]))
    return jnp.concatenate(halves, axis=1)
