"""The least time of a decode step and of a prefill: each resource at its peak, all at once.

Reading weights and reading the cache share the memory and are added; memory, arithmetic and network
may overlap entirely, so that the longest of them is the bound. Experts are chosen alike, and every
device has as much to do: no program takes less, most take more.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from dsv3_jax.accounting import cache_bytes_per_token, flops_per_token
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.network import sent
from dsv3_jax.plan.weights import Share
from pallas_kernels.mla_decode.api import page_width


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds that each resource of a device needs, and tokens of all devices meanwhile."""

    weights: float
    cache: float
    arithmetic: float
    network: float
    tokens: int
    devices: int

    @property
    def seconds(self) -> float:
        return max(self.weights + self.cache, self.arithmetic, self.network)

    @property
    def binding(self) -> str:
        """What takes ``seconds``; of the memory's two, the larger."""
        times = {
            "memory": self.weights + self.cache,
            "arithmetic": self.arithmetic,
            "network": self.network,
        }
        longest = max(times, key=times.__getitem__)
        if longest == "memory":
            return "weights" if self.weights >= self.cache else "cache"
        return longest

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.devices


def decode(share: Share, plan: Deployment, *, sums: DTypeLike = jnp.float32) -> Roofline:
    """Of a step of all rows behind ``plan.context`` tokens each. With ``mtp`` it checks a draft a
    row, all of which hold.

    Args:
      sums: see :func:`dsv3_jax.plan.network.sent`.
    """
    c = share.shapes.config
    own = share.own_rows(plan.batch)
    each = 1 + plan.depth
    places, together = own * each, share.rows_together(plan.batch) * each
    # Devices that share a sequence's cached tokens run the same queries, each over its part.
    shared = share.layout.num_shards("cached_tokens")
    attention = flops_per_token(c, plan.context, "decode").attention / shared
    return _roofline(
        share,
        plan,
        passes=1,
        weights=share.read_bytes(together, places, decoding=True),
        cache=own * plan.context / shared * _token_bytes(plan),
        operations=share.operations(
            together, places, decoding=True, float8=plan.activations is not None
        ),
        attention=places * attention,
        own_tokens=places,
        tokens=plan.batch * each,
        sums=sums,
    )


def prefill(share: Share, plan: Deployment, *, sums: DTypeLike = jnp.float32) -> Roofline:
    """Of whole prompts of ``plan.context`` tokens, ``plan.prefill_chunk`` of each row at a time.

    A chunk expands the keys and values of what was cached before it, which costs kv_b_proj once
    more for each of these tokens.
    """
    c = share.shapes.config
    own = share.own_rows(plan.batch)
    chunk = min(plan.prefill_chunk, plan.context)
    passes = -(-plan.context // chunk)
    own_tokens = own * plan.context
    together = share.rows_together(plan.batch) * plan.context
    again = own * chunk * passes * (passes - 1) // 2
    wide, narrow = share.operations(
        together, own_tokens, decoding=False, float8=plan.activations is not None
    )
    expanded = sum(p.elements for p in share.parts if p.is_matrix and "kv_b_proj" in p.path)
    attention = flops_per_token(c, plan.context, "prefill").attention
    # Devices that share a sequence's cached tokens divide the chunks before; each attends to the
    # new one, 1 / passes of all, itself.
    shared = share.layout.num_shards("cached_tokens")
    attention *= 1 / passes + (1 - 1 / passes) / shared
    again /= shared
    per_pass = share.read_bytes(-(-together // passes), -(-own_tokens // passes), decoding=False)
    return _roofline(
        share,
        plan,
        passes=passes,
        weights=per_pass,
        cache=(own_tokens + again) * _token_bytes(plan),
        operations=(wide, narrow + 2 * expanded * again),
        attention=own_tokens * attention,
        own_tokens=own_tokens,
        tokens=plan.batch * plan.context,
        sums=sums,
    )


def _token_bytes(plan: Deployment) -> float:
    """Of the cache, as wide as the kernels of the target read it."""
    width = plan.config.latent_dim
    read = page_width(width, plan.target.platform) / width
    return read * cache_bytes_per_token(plan.config, mtp=plan.mtp)


def _roofline(
    share: Share,
    plan: Deployment,
    *,
    passes: int,
    weights: float,
    cache: float,
    operations: tuple[float, float],
    attention: float,
    own_tokens: int,
    tokens: int,
    sums: DTypeLike,
) -> Roofline:
    chip = plan.target.chip
    wide, narrow = operations
    wide += attention / share.layout.num_shards("heads")
    going = sent(share, plan, own_tokens, sums)
    return Roofline(
        weights=passes * weights / chip.bandwidth,
        cache=cache / chip.bandwidth,
        arithmetic=wide / chip.bf16 + narrow / (chip.fp8 or chip.bf16),
        network=max(
            going.link / chip.link,
            going.between_nodes / chip.between_nodes if going.between_nodes else 0.0,
        ),
        tokens=tokens,
        devices=plan.target.devices,
    )
