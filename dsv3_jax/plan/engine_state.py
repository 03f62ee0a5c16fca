"""The arrays of an Engine's or a Generator's state: cache pages and request slots."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.device.page_pool import default_pages
from dsv3_jax.engine.device.state import SlotState
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE, PagePool
from dsv3_jax.layers.paged_cache import PAGE_AXES
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.weights import ModelShard
from sharding import abstract_layout


def default_buckets(target: Target, layout_name: str, decodes: int) -> Buckets:
    """Returns the buckets of an Engine on these devices by default.

    Args:
      decodes: number of slots of each data-parallel shard.
    """
    token_shards = abstract_layout(layout_name, target.devices).num_shards("cached_tokens")
    is_hopper = target.platform == "gpu" and target.chip.has_kernels
    return Buckets.default(
        decodes,
        platform=target.platform,
        is_hopper=is_hopper,
        token_shards=token_shards,
        one_request=is_hopper and target.devices == 1,
    )


def bytes_per_page(deployment: Deployment) -> int:
    """Returns the bytes of a page in all layers."""
    return deployment.cache_spec.page_bytes(DEFAULT_PAGE_SIZE, deployment.target.platform)


def local_pages(shard: ModelShard, deployment: Deployment) -> int:
    """Returns the number of cache pages on one device.

    A Generator has the pages of the longest requests in all slots. By default, an Engine takes what
    fits, but at least the pages of one request.
    """
    sharers = shard.layout.num_shards("cached_tokens")
    if deployment.engine is None:
        longest = deployment.max_len + deployment.draft_depth
        return shard.local_batch(deployment.batch) * -(-longest // (DEFAULT_PAGE_SIZE * sharers))
    cache_tokens = deployment.engine.cache_tokens
    if cache_tokens is not None:
        return cache_tokens // (DEFAULT_PAGE_SIZE * shard.layout.num_shards(PAGE_AXES[0]))
    model = shard.weight_bytes + shard.up_projection_bytes
    free = max(0, deployment.target.chip.memory - model)
    of_a_request = -(
        -(deployment.context + deployment.draft_depth) // (DEFAULT_PAGE_SIZE * sharers)
    )
    return max(default_pages(free, bytes_per_page(deployment)), of_a_request)


def cache_tokens(shard: ModelShard, deployment: Deployment) -> int:
    """Returns the number of tokens in the caches of all devices together."""
    return _tokens(shard, local_pages(shard, deployment))


def largest_cache_tokens(shard: ModelShard, deployment: Deployment, spare: int) -> int:
    """Returns the most tokens for which the caches have room.

    Args:
      spare: bytes of a device that nothing uses now.
    """
    pages = local_pages(shard, deployment) + spare // bytes_per_page(deployment)
    return _tokens(shard, pages)


def slot_bytes(shard: ModelShard, deployment: Deployment) -> int:
    """Returns the bytes of one device's request slots."""
    depth = deployment.draft_depth
    hidden_size = deployment.config.hidden_size

    def empty_slots() -> list[jax.Array]:
        state = SlotState.empty(
            PagePool(()),
            shard.local_batch(deployment.batch),
            deployment.max_len,
            mtp_inputs=(depth + 1 if deployment.mtp else 0, hidden_size),
            dtype=jnp.bfloat16,
        )
        return jax.tree.leaves(state)

    leaves = jax.eval_shape(empty_slots)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def _tokens(shard: ModelShard, pages: int) -> int:
    return pages * DEFAULT_PAGE_SIZE * shard.layout.num_shards(PAGE_AXES[0])
