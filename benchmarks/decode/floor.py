"""Lower bound of a step's time: every needed byte is read once at the measured bandwidth."""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.layers.paged_cache import LayerCacheSpec
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.plan.weights import parameter_shards, read_bytes

WINDOWS, RUNS = 5, 10


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


def bandwidth() -> float:
    """Returns the bandwidth in bytes per second of a sum over 2 GiB, on a CPU over 2 MiB."""
    words = 2**30 if jax.default_backend() == "gpu" else 2**20
    x = jax.random.normal(jax.random.key(0, impl="rbg"), (words,), jnp.bfloat16)
    add = jax.jit(functools.partial(jnp.sum, dtype=jnp.float32))
    return x.nbytes / seconds(lambda: add(x))


def seconds(run: Any) -> float:
    """Returns the seconds per run, with several runs in flight: the median over windows."""
    jax.block_until_ready(run())
    windows = []
    for _ in range(WINDOWS):
        began = time.perf_counter()
        jax.block_until_ready([run() for _ in range(RUNS)])
        windows.append((time.perf_counter() - began) / RUNS)
    return statistics.median(windows)
