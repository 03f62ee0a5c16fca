"""Memory that a device needs for a decode step or a prefill, in bytes.

Weights, cache and state are the arrays themselves, built from shapes. The rest are formulas of
:mod:`dsv3_jax.plan.workspace`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dsv3_jax.layers.paged_cache import Form
from dsv3_jax.plan import engine_state
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.weights import ModelShard
from dsv3_jax.plan.workspace import (
    dequantized_bytes,
    layer_bytes,
    sampling_bytes,
    tiled_bytes,
)


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Memory use of one device in one phase. All fields are bytes."""

    weights: int
    """Parameters as stored."""
    cache: int
    """Pages of the latent cache."""
    state: int
    """Tokens, settings and counters of the sequences."""
    up_projections: int
    """bfloat16 up-projections that decode keeps in addition to the weights: see
    ``DeepSeekV3.precompute_for_decode``."""
    dequantized: int
    """bfloat16 copies of quantized weights, made where there are too many tokens for the kernels
    that read weights as stored."""
    tiled: int
    """Second copies of weights, in the tiles that the chip's matmuls need."""
    exchange: int
    """Buffers that bring tokens to experts on other devices and back."""
    workspace: int
    """All other temporary arrays at the moment when memory use is highest."""

    @property
    def peak(self) -> int:
        """Sum of all parts."""
        return sum(vars(self).values())


LABELS = {
    "weights": "weights",
    "cache": "latent cache",
    "state": "tokens, counters",
    "up_projections": "up-projections for decode",
    "dequantized": "weights dequantized to bfloat16",
    "tiled": "weights in other tiles",
    "exchange": "exchange buffers",
    "workspace": "workspace",
}
"""Label in tables of each field of :class:`MemoryUse`."""


def by_phase(shard: ModelShard, deployment: Deployment) -> dict[str, MemoryUse]:
    """Returns the memory use of a device in each phase, ``"decode"`` and ``"prefill"``."""
    state = _state_bytes(shard, deployment)
    return {
        "decode": _decode(shard, deployment, *state),
        "prefill": _prefill(shard, deployment, *state),
    }


def decode(shard: ModelShard, deployment: Deployment) -> MemoryUse:
    """Returns the memory use of a device in a decode step."""
    return _decode(shard, deployment, *_state_bytes(shard, deployment))


def prefill(shard: ModelShard, deployment: Deployment) -> MemoryUse:
    """Returns the memory use of a device in prefill.

    The Generator runs a chunk of every sequence at once. The largest step of an Engine has its
    chunks, and a token of every sequence with the drafts after it.
    """
    return _prefill(shard, deployment, *_state_bytes(shard, deployment))


def _decode(shard: ModelShard, deployment: Deployment, cache: int, state: int) -> MemoryUse:
    tokens = shard.local_batch(deployment.batch) * (1 + deployment.draft_depth)
    return MemoryUse(
        weights=shard.weight_bytes,
        cache=cache,
        state=state,
        up_projections=shard.up_projection_bytes,
        dequantized=dequantized_bytes(shard, deployment, tokens, except_for="kv_b_proj"),
        # The up-projections, which replace kv_b_proj, are made in the matmul's tiles.
        tiled=tiled_bytes(shard, deployment, except_for="kv_b_proj"),
        **_temporary_bytes(shard, deployment, [("absorbed", tokens)], sampled=tokens),
    )


def _prefill(shard: ModelShard, deployment: Deployment, cache: int, state: int) -> MemoryUse:
    engine, sequences = deployment.engine, shard.local_batch(deployment.batch)
    if engine is None:
        tokens = sequences * deployment.chunk_tokens
        return MemoryUse(
            weights=shard.weight_bytes,
            cache=cache,
            state=state,
            up_projections=shard.up_projection_bytes,
            dequantized=dequantized_bytes(shard, deployment, tokens),
            tiled=tiled_bytes(shard, deployment),
            **_temporary_bytes(shard, deployment, [("expanded", tokens)], sampled=sequences),
        )
    decoding = sequences * (1 + deployment.draft_depth)
    prompt = engine.chunks * deployment.chunk_tokens
    return MemoryUse(
        weights=shard.weight_bytes,
        cache=cache,
        state=state,
        up_projections=shard.up_projection_bytes,
        dequantized=dequantized_bytes(shard, deployment, prompt + decoding),
        tiled=tiled_bytes(shard, deployment),
        **_temporary_bytes(
            shard,
            deployment,
            [(engine.chunk_form, prompt), ("absorbed", decoding)],
            sampled=(sequences + engine.chunks) * (1 + deployment.draft_depth),
        ),
    )


def _temporary_bytes(
    shard: ModelShard, deployment: Deployment, tokens: Sequence[tuple[Form, int]], *, sampled: int
) -> dict[str, int]:
    """Returns the bytes of the exchange's buffers and of the workspace.

    Args:
      tokens: form of attention and number of tokens of each batch.
      sampled: number of tokens whose logits are computed. The layers' arrays are freed before.
    """
    logits = sampling_bytes(shard, sampled)
    layer, exchange = layer_bytes(shard, deployment, tokens)
    exchange = min(exchange, max(logits, layer + exchange))
    return {"exchange": exchange, "workspace": max(logits, layer + exchange) - exchange}


def _state_bytes(shard: ModelShard, deployment: Deployment) -> tuple[int, int]:
    """Returns the bytes of the device's cache pages, and of everything else in its state."""
    pages = engine_state.local_pages(shard, deployment)
    cache = pages * engine_state.bytes_per_page(deployment)
    return cache, engine_state.slot_bytes(shard, deployment)
