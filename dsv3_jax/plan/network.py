"""Bytes that a device sends in the layers of one pass, while it receives as many."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax.typing import DTypeLike

from dsv3_jax.config import ModelConfig
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.memory import row_bytes
from dsv3_jax.plan.weights import Share


@dataclasses.dataclass(frozen=True)
class Sent:
    """By one device, on average if experts are chosen alike."""

    link: float = 0.0
    """To devices of its own node."""
    between_nodes: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.link + other.link, self.between_nodes + other.between_nodes)

    def __mul__(self, count: float) -> Sent:
        return Sent(self.link * count, self.between_nodes * count)


def sent(share: Share, plan: Deployment, tokens: int, sums: DTypeLike = jnp.float32) -> Sent:
    """In all layers, for so many tokens of a device: the least that the layout's collectives can do
    with. Between nodes nothing goes twice to the same node.

    Args:
      sums: in which results come back; ours are float32.
    """
    c, layout = share.shapes.config, share.layout
    depth = plan.depth
    moe, dense = c.num_moe_layers + depth, c.num_hidden_layers - c.num_moe_layers
    total = jnp.dtype(sums).itemsize * c.hidden_size
    n = math.prod(layout.mesh.shape[a] for a in layout.exchange_axes)
    out = Sent()
    if n > 1:
        each = tokens * (row_bytes(share, layout) + total)
        if layout.exchange == "all_gather":
            here, nodes = _near(plan, n)
            reached = Sent(here - 1, nodes - 1) if nodes > 1 else Sent(n - 1, 0)
        else:
            reached = _reached(c, plan, n)
        out += reached * (moe * each)
    if (parts := layout.num_shards("heads")) > 1:
        out += _all_reduce(plan, parts, tokens * total) * (moe + dense)
    if (parts := layout.num_shards("cached_tokens")) > 1:
        # Attention's results in float32, with their log-sum-exp.
        merged = 4 * c.num_attention_heads // layout.num_shards("heads") * (c.v_head_dim + 1)
        out += _all_reduce(plan, parts, tokens * merged) * (moe + dense)
    if (parts := layout.num_shards("ffn")) > 1:
        out += _all_reduce(plan, parts, tokens * total) * dense
    within = math.prod(layout.mesh.shape[a] for a in layout.reduce_axes) * layout.num_shards(
        "expert_ffn"
    )
    if within > 1:
        out += _all_reduce(plan, within, tokens * total) * moe
    return out


def devices_reached(config: ModelConfig, parts: int) -> float:
    """Of ``parts``, over which experts lie, how many a token's K experts lie on, on average. All of
    them are of ``topk_group`` of the ``n_group`` groups, which lie on neighbours."""
    K, groups, kept = config.num_experts_per_tok, config.n_group, config.topk_group
    if parts <= groups and groups % parts == 0:
        missed = math.comb(groups - groups // parts, kept) / math.comb(groups, kept)
        return min(parts * (1 - missed), parts * (1 - (1 - 1 / parts) ** K))
    of_groups = max(1.0, parts * kept / groups)
    return of_groups * (1 - (1 - 1 / of_groups) ** K)


def _near(plan: Deployment, n: int) -> tuple[int, int]:
    """Devices of a node among ``n``, and nodes."""
    here = min(n, plan.target.chip.node or n)
    return here, -(-n // here)


def _reached(config: ModelConfig, plan: Deployment, n: int) -> Sent:
    """Others to which a token goes."""
    here, nodes = _near(plan, n)
    reached = devices_reached(config, n)
    if nodes == 1:
        return Sent(reached * (n - 1) / n, 0)
    return Sent(reached * (here - 1) / n, devices_reached(config, nodes) * (nodes - 1) / nodes)


def _all_reduce(plan: Deployment, n: int, nbytes: float) -> Sent:
    """A reduce-scatter and an all-gather, within nodes first."""
    here, nodes = _near(plan, n)
    inside = 2 * nbytes * (here - 1) / here
    return Sent(inside, 2 * nbytes / here * (nodes - 1) / nodes)
