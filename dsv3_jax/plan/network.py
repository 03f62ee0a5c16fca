"""Bytes that a device sends to other devices in one pass. It receives as many at the same time."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax.typing import DTypeLike

from dsv3_jax.config import ModelConfig
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.weights import ModelShard
from dsv3_jax.plan.workspace import token_bytes


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Amounts that one device sends: bytes, or numbers of devices. They are averages over tokens,
    if all experts are equally likely."""

    within_node: float = 0.0
    """To devices of its own node."""
    between_nodes: float = 0.0
    """To devices of other nodes."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.within_node + other.within_node, self.between_nodes + other.between_nodes
        )

    def __mul__(self, factor: float) -> Traffic:
        return Traffic(self.within_node * factor, self.between_nodes * factor)


def traffic(
    shard: ModelShard,
    deployment: Deployment,
    local_tokens: int,
    result_dtype: DTypeLike = jnp.float32,
) -> Traffic:
    """Returns the fewest bytes that the layout's collectives can send, in all layers.

    No token crosses to the same node twice.

    Args:
      local_tokens: tokens on this device.
      result_dtype: dtype in which results return. This project's are float32.
    """
    c, layout = shard.shapes.config, shard.layout
    depth = deployment.draft_depth
    moe, dense = c.num_moe_layers + depth, c.num_hidden_layers - c.num_moe_layers
    result = jnp.dtype(result_dtype).itemsize * c.hidden_size
    n = math.prod(layout.mesh.shape[a] for a in layout.exchange_axes)
    total = Traffic()
    if n > 1:
        nbytes = local_tokens * (token_bytes(shard, layout) + result)
        if layout.exchange == "all_gather":
            node_size, nodes = _nodes(deployment, n)
            peers = Traffic(node_size - 1, nodes - 1) if nodes > 1 else Traffic(n - 1, 0)
        else:
            peers = _peers(c, deployment, n)
        total += peers * (moe * nbytes)
    if (parts := layout.num_shards("heads")) > 1:
        total += _all_reduce(deployment, parts, local_tokens * result) * (moe + dense)
    if (parts := layout.num_shards("cached_tokens")) > 1:
        # Attention's results in float32, with their log-sum-exp.
        merged = 4 * c.num_attention_heads // layout.num_shards("heads") * (c.v_head_dim + 1)
        total += _all_reduce(deployment, parts, local_tokens * merged) * (moe + dense)
    if (parts := layout.num_shards("ffn")) > 1:
        total += _all_reduce(deployment, parts, local_tokens * result) * dense
    parts = math.prod(layout.mesh.shape[a] for a in layout.reduce_axes)
    parts *= layout.num_shards("expert_ffn")
    if parts > 1:
        total += _all_reduce(deployment, parts, local_tokens * result) * moe
    return total


def devices_reached(config: ModelConfig, parts: int) -> float:
    """Returns the mean number of devices that have a token's K experts, out of ``parts``.

    The experts of a token belong to ``topk_group`` of the ``n_group`` groups, and a group's experts
    are on neighbouring devices.
    """
    K, groups, chosen_groups = config.num_experts_per_tok, config.n_group, config.topk_group
    if parts <= groups and groups % parts == 0:
        missed = math.comb(groups - groups // parts, chosen_groups) / math.comb(
            groups, chosen_groups
        )
        return min(parts * (1 - missed), parts * (1 - (1 - 1 / parts) ** K))
    candidates = max(1.0, parts * chosen_groups / groups)
    return candidates * (1 - (1 - 1 / candidates) ** K)


def _nodes(deployment: Deployment, n: int) -> tuple[int, int]:
    """Returns the number of devices per node among ``n`` devices, and the number of nodes."""
    node_size = min(n, deployment.target.chip.node_size or n)
    return node_size, -(-n // node_size)


def _peers(config: ModelConfig, deployment: Deployment, n: int) -> Traffic:
    """Returns the mean number of other devices, and of other nodes, that a token is sent to."""
    node_size, nodes = _nodes(deployment, n)
    reached = devices_reached(config, n)
    if nodes == 1:
        return Traffic(reached * (n - 1) / n, 0)
    return Traffic(
        reached * (node_size - 1) / n, devices_reached(config, nodes) * (nodes - 1) / nodes
    )


def _all_reduce(deployment: Deployment, n: int, nbytes: float) -> Traffic:
    """Returns the bytes sent in a reduce-scatter and an all-gather, each within nodes first."""
    node_size, nodes = _nodes(deployment, n)
    within_node = 2 * nbytes * (node_size - 1) / node_size
    return Traffic(within_node, 2 * nbytes / node_size * (nodes - 1) / nodes)
