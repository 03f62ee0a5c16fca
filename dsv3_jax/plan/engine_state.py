"""The arrays of an :class:`~dsv3_jax.engine.Engine`: its cache pages and its request slots."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from dsv3_jax.engine.cache_size import default_pages, page_bytes
from dsv3_jax.engine.state import SlotState
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE, CacheSpec, PagePool
from dsv3_jax.plan.deployment import Deployment, EngineSettings
from dsv3_jax.plan.weights import ModelShard


def bytes_per_page(deployment: Deployment) -> int:
    """Returns the bytes of a page in all layers."""
    spec = CacheSpec.of_config(deployment.config, jnp.bfloat16, mtp=deployment.mtp)
    return page_bytes(spec, DEFAULT_PAGE_SIZE, deployment.target.platform)


def local_pages(shard: ModelShard, deployment: Deployment) -> int:
    """Returns the number of cache pages on one device.

    By default it is what an Engine takes, but at least the pages of one request.
    """
    cache_tokens = _settings(deployment).cache_tokens
    if cache_tokens is not None:
        return cache_tokens // DEFAULT_PAGE_SIZE // shard.layout.num_shards("batch")
    model = shard.weight_bytes + shard.up_projection_bytes
    free = max(0, deployment.target.chip.memory - model)
    of_a_request = -(-(deployment.context + deployment.draft_depth) // DEFAULT_PAGE_SIZE)
    return max(default_pages(free, bytes_per_page(deployment)), of_a_request)


def cache_tokens(shard: ModelShard, pages: int) -> int:
    """Returns the number of tokens in the caches of all devices, with ``pages`` on each."""
    return pages * DEFAULT_PAGE_SIZE * shard.layout.num_shards("batch")


def local_chunks(shard: ModelShard, engine: EngineSettings) -> int:
    """Returns the most prefill chunks of a step on one device."""
    return -(-engine.chunks // shard.layout.num_shards("batch"))


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


def _settings(deployment: Deployment) -> EngineSettings:
    assert deployment.engine is not None
    return deployment.engine
