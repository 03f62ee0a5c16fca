"""Lower bound of a step's time: every needed byte is read once."""

from __future__ import annotations

from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.layers.paged_cache import LayerCacheSpec
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.plan.weights import parameter_shards, read_bytes


def step_bytes(model: DeepSeekV3, batch: int, cached: int) -> float:
    """Returns the bytes that a device reads in one decode step.

    They are the weights of the main model, with the expected number of distinct experts and one
    embedding row per token, and the cache: of a model with an indexer all of its keys, and the
    latents of at most ``index_topk`` tokens. ``model`` may be abstract.

    Args:
      batch: batch size, over all devices.
      cached: cached tokens per sequence.
    """
    c, layout = model.config, model.layout
    local_batch = batch if layout is None else batch // layout.num_shards("batch")
    main_shards = [shard for shard in parameter_shards(model, layout) if shard.path[0] != "mtp"]
    weights = read_bytes(
        main_shards,
        tokens=batch,
        local_tokens=local_batch,
        experts_per_token=c.num_experts_per_tok,
        expert_slots=c.n_routed_experts,
    )
    read = sum(_cache_bytes(layer, cached, c.index_topk) for layer in model.cache_spec().layers)
    return weights + local_batch * read


def _cache_bytes(spec: LayerCacheSpec, cached: int, topk: int | None) -> int:
    """Returns the bytes that one query reads from a layer's cache of ``cached`` tokens."""
    attended = cached if topk is None else min(cached, topk)
    return sum(
        array.page_bytes(DEFAULT_PAGE_SIZE)
        * (attended if name == "latent" else cached)
        // DEFAULT_PAGE_SIZE
        for name, array in spec.items()
    )
