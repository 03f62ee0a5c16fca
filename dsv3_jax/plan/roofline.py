"""Lower bounds on the time of a decode step and of a prefill, in seconds.

The roofline model: each resource of a device works at its peak rate, and the resources overlap
perfectly. The bound is the largest of three times:

- memory: bytes of weights and of cache that are read, divided by memory bandwidth;
- arithmetic: FLOP of matmuls, divided by peak FLOP/s;
- network: bytes sent, divided by link bandwidth.

It assumes that all experts are equally likely and that every device has the same work. No program
takes less time, and most take more: launches, latency of collectives and imperfect overlap are not
counted.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from dsv3_jax.accounting import flops_per_token
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.network import traffic
from dsv3_jax.plan.weights import ModelShard


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds that each resource of a device needs at its peak rate, and the tokens processed."""

    weights: float
    """Seconds to read the weights from memory."""
    cache: float
    """Seconds to read the cache from memory."""
    arithmetic: float
    """Seconds of matmuls."""
    network: float
    """Seconds to send to other devices."""
    tokens: int
    """Tokens that all devices together process in this time."""
    devices: int
    """Number of devices."""

    @property
    def seconds(self) -> float:
        """Lower bound on the time: the largest of memory, arithmetic and network."""
        return max(self.weights + self.cache, self.arithmetic, self.network)

    @property
    def binding(self) -> str:
        """The resource that determines ``seconds``: ``"weights"`` or ``"cache"``, whichever takes
        more of the memory's time, ``"arithmetic"`` or ``"network"``."""
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
        """Upper bound on the tokens/s of all devices."""
        return self.tokens / self.seconds

    @property
    def tokens_per_s_per_device(self) -> float:
        """Upper bound on the tokens/s of one device."""
        return self.tokens_per_s / self.devices


def decode(
    shard: ModelShard, deployment: Deployment, *, result_dtype: DTypeLike = jnp.float32
) -> Roofline:
    """Returns the bound of one decode step of all sequences, each with ``context`` cached tokens.

    With ``mtp`` the step also verifies one draft per sequence, and every draft is accepted.

    Args:
      result_dtype: see :func:`dsv3_jax.plan.network.traffic`.
    """
    c = shard.shapes.config
    local_batch = shard.local_batch(deployment.batch)
    queries = 1 + deployment.draft_depth  # per sequence
    local_tokens = local_batch * queries
    tokens = shard.expert_group_batch(deployment.batch) * queries
    # Devices that share a sequence's cached tokens run the same queries, each over its own part.
    sharers = shard.layout.num_shards("cached_tokens")
    flops = flops_per_token(c, deployment.context, "decode")
    return _roofline(
        shard,
        deployment,
        passes=1,
        weight_bytes=shard.read_bytes(tokens, local_tokens, decoding=True),
        cache_bytes=local_batch * _read_by_decode(deployment) / sharers,
        matmul_flop=shard.matmul_flop(
            tokens, local_tokens, decoding=True, float8=deployment.activations is not None
        ),
        attention_flop=local_tokens * flops.attention / sharers,
        indexer_flop=local_tokens * flops.indexer / sharers,
        local_tokens=local_tokens,
        all_tokens=deployment.batch * queries,
        result_dtype=result_dtype,
    )


def prefill(
    shard: ModelShard, deployment: Deployment, *, result_dtype: DTypeLike = jnp.float32
) -> Roofline:
    """Returns the bound of the prefill of whole prompts of ``context`` tokens, in chunks.

    Each chunk expands the keys and values of all tokens cached before it. That applies kv_b_proj
    once more to each of these tokens. Sparse attention expands none of them, and each chunk reads
    the indexer keys of all, and at least once the latents.

    Args:
      result_dtype: see :func:`dsv3_jax.plan.network.traffic`.
    """
    c = shard.shapes.config
    local_batch = shard.local_batch(deployment.batch)
    chunk = min(deployment.prefill_chunk, deployment.context)
    passes = -(-deployment.context // chunk)
    local_tokens = local_batch * deployment.context
    tokens = shard.expert_group_batch(deployment.batch) * deployment.context
    float8 = deployment.activations is not None
    bfloat16_flop, float8_flop = shard.matmul_flop(
        tokens, local_tokens, decoding=False, float8=float8
    )
    kv_b_proj = sum(p.elements for p in shard.parameters if p.is_matrix and "kv_b_proj" in p.path)
    flops = flops_per_token(c, deployment.context, "prefill")
    # Devices that share a sequence's cached tokens divide the earlier chunks among them. Each of
    # them attends to the whole new chunk, which is 1 / passes of the context.
    sharers = shard.layout.num_shards("cached_tokens")
    shared = 1 / passes + (1 - 1 / passes) / sharers
    read_again = local_batch * chunk * passes * (passes - 1) // 2
    read_again /= sharers
    is_sparse = c.index_topk is not None and deployment.context > c.index_topk
    if is_sparse:
        kv_b_proj = 0
    if float8 and deployment.quantization == "fp8":
        float8_flop += 2 * kv_b_proj * read_again
    else:
        bfloat16_flop += 2 * kv_b_proj * read_again
    bytes_per_pass = shard.read_bytes(
        -(-tokens // passes), -(-local_tokens // passes), decoding=False
    )
    return _roofline(
        shard,
        deployment,
        passes=passes,
        weight_bytes=bytes_per_pass,
        cache_bytes=local_tokens * cached_token_bytes(deployment)
        + read_again * cached_token_bytes(deployment, selected=0 if is_sparse else 1),
        matmul_flop=(bfloat16_flop, float8_flop),
        attention_flop=local_tokens * flops.attention * shared,
        indexer_flop=local_tokens * flops.indexer * shared,
        local_tokens=local_tokens,
        all_tokens=deployment.batch * deployment.context,
        result_dtype=result_dtype,
    )


def _read_by_decode(deployment: Deployment) -> float:
    """Returns the bytes that a decode step reads of one sequence's cache.

    Sparse attention reads the latents of ``index_topk`` tokens and the indexer keys of all.
    """
    topk, context = deployment.config.index_topk, deployment.context
    selected = 1.0 if topk is None else min(1.0, topk / context)
    return context * cached_token_bytes(deployment, selected=selected)


def cached_token_bytes(deployment: Deployment, *, selected: float = 1.0) -> float:
    """Returns the bytes of a cached token in all layers, padded as the target's kernels read it.

    Args:
      selected: share of the tokens whose latents count; indexer keys always do.
    """
    spec, platform = deployment.cache_spec, deployment.target.platform
    return sum(
        array.page_bytes(DEFAULT_PAGE_SIZE, platform)
        / DEFAULT_PAGE_SIZE
        * (selected if name == "latent" else 1)
        for layer in (*spec.layers, *spec.mtp)
        for name, array in layer.items()
    )


def _roofline(
    shard: ModelShard,
    deployment: Deployment,
    *,
    passes: int,
    weight_bytes: float,
    cache_bytes: float,
    matmul_flop: tuple[float, float],
    attention_flop: float,
    indexer_flop: float,
    local_tokens: int,
    all_tokens: int,
    result_dtype: DTypeLike,
) -> Roofline:
    """Divides amounts by the chip's rates.

    Args:
      passes: passes over all weights.
      weight_bytes: bytes of weights that one pass reads.
      cache_bytes: bytes of cache that all passes read.
      matmul_flop: bfloat16 and float8 FLOP of matmuls with weights, in all passes.
      attention_flop: FLOP of attention with all heads, in all passes.
      indexer_flop: FLOP of indexer scores, in all passes. Every device computes those of all heads.
      local_tokens: tokens on this device, in all passes.
      all_tokens: tokens on all devices, in all passes.
    """
    chip = deployment.target.chip
    bfloat16_flop, float8_flop = matmul_flop
    bfloat16_flop += attention_flop / shard.layout.num_shards("heads")
    if deployment.activations is None:
        bfloat16_flop += indexer_flop
    else:
        float8_flop += indexer_flop
    sent = traffic(shard, deployment, local_tokens, result_dtype)
    return Roofline(
        weights=passes * weight_bytes / chip.memory_bandwidth,
        cache=cache_bytes / chip.memory_bandwidth,
        arithmetic=bfloat16_flop / chip.bf16_flops
        + float8_flop / (chip.fp8_flops or chip.bf16_flops),
        network=max(
            sent.within_node / chip.link_bandwidth,
            sent.between_nodes / chip.internode_bandwidth if sent.between_nodes else 0.0,
        ),
        tokens=all_tokens,
        devices=deployment.target.devices,
    )
