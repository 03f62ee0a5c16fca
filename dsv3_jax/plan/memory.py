"""Bytes that a device needs: weights, cache, and what a decode step or a prefill works in.

Weights, cache and state are the arrays themselves, made of shapes. The workspace is a formula, with
constants of XLA's programs: benchmarks/results has what they were held against.
M tokens of one device, in rows; D, H, C, V, K as in the model.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from dsv3_jax.generation.state import DecodeState
from dsv3_jax.kv_cache import PAGE_SIZE, LatentKVCache
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.weights import Part, Share
from pallas_kernels.grouped_matmul.mosaic_gpu import check_few
from sharding import Layout, default_capacity, default_pairs_per_call
from sharding.token_packer import FLOAT8_BLOCK

_SAMPLING_BYTES = 41
"""A logit: float32 itself, and what sorting a vocabulary for top-k and top-p takes."""

_SUBLANES = 8  # rows of a TPU's float32 tile

_CONTEXT_TOKENS = 4096  # whose keys and values a prefill chunk expands at a time


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    weights: int
    cache: int
    state: int
    """Tokens, log-probabilities and counters of the rows."""
    up_projections: int
    """Beside the weights, while decoding: see DeepSeekV3.ready_to_decode."""
    dequantized: int
    """Weights in bfloat16, where rows are too many for the kernels that read them as stored."""
    tiled: int
    """Weights a second time, in the tiles that the chip multiplies."""
    exchange: int
    """Tokens on their way to experts and back."""
    workspace: int
    """Everything else at the fullest moment."""

    @property
    def peak(self) -> int:
        return sum(vars(self).values())


MEANINGS = {
    "weights": "weights",
    "cache": "latent cache",
    "state": "tokens, counters",
    "up_projections": "up-projections held to decode",
    "dequantized": "weights dequantized for many rows",
    "tiled": "weights in other tiles",
    "exchange": "exchange of tokens",
    "workspace": "workspace",
}
"""What each field of :class:`Memory` is called in tables."""


def phases(share: Share, plan: Deployment) -> dict[str, Memory]:
    """Returns what a device holds while decoding, and in prefill."""
    held = _state(share, plan)
    return {"decode": _decoding(share, plan, held), "prefill": _prefilling(share, plan, held)}


def decoding(share: Share, plan: Deployment) -> Memory:
    """Of a step."""
    return _decoding(share, plan, _state(share, plan))


def prefilling(share: Share, plan: Deployment) -> Memory:
    """Of a chunk of all rows."""
    return _prefilling(share, plan, _state(share, plan))


def _decoding(share: Share, plan: Deployment, held: tuple[int, int]) -> Memory:
    rows = share.own_rows(plan.batch)
    places = rows * (1 + plan.depth)
    cache, state = held
    # Logits come when the layers are done with.
    logits = _SAMPLING_BYTES * places * share.shapes.config.vocab_size
    layer, exchange = _layer(share, plan, places, "absorbed")
    exchange = min(exchange, max(logits, layer + exchange))
    return Memory(
        weights=share.weights,
        cache=cache,
        state=state,
        up_projections=share.up_projections,
        dequantized=_dequantized(share, plan, places, but="kv_b_proj"),
        tiled=_tiled(share, plan, but="kv_b_proj"),  # up-projections are made in these tiles
        exchange=exchange,
        workspace=max(logits, layer + exchange) - exchange,
    )


def _prefilling(share: Share, plan: Deployment, held: tuple[int, int]) -> Memory:
    tokens = share.own_rows(plan.batch) * min(plan.prefill_chunk, plan.context)
    cache, state = held
    layer, exchange = _layer(share, plan, tokens, "expanded")
    return Memory(
        weights=share.weights,
        cache=cache,
        state=state,
        up_projections=0,
        dequantized=_dequantized(share, plan, tokens),
        tiled=_tiled(share, plan, but="lm_head"),  # which a chunk that draws nothing leaves out
        exchange=exchange,
        workspace=layer,
    )


def _state(share: Share, plan: Deployment) -> tuple[int, int]:
    """Bytes of the cache's pages on the device, and of everything else in its DecodeState."""
    config, depth = share.shapes.config, plan.depth
    rows = share.own_rows(plan.batch)
    max_len = -(-(plan.context + 1) // PAGE_SIZE) * PAGE_SIZE
    pages = -(-(max_len + depth) // PAGE_SIZE)  # of a sequence, on all devices that share them
    own_pages = -(-pages // share.layout.num_shards("cached_tokens"))

    def empty() -> tuple[list[jax.Array], list[jax.Array]]:
        cache = LatentKVCache.init(
            config,
            rows,
            max_len + depth,
            dtype=jnp.bfloat16,
            mtp=plan.mtp,
            platform=plan.target.platform,
        )
        state = DecodeState.empty(
            cache,
            max_len,
            depth=depth,
            feed=(depth + 1 if plan.mtp else 0, config.hidden_size),
            dtype=jnp.bfloat16,
            top=0,
        )
        return jax.tree.leaves((cache.pages, cache.mtp_pages)), jax.tree.leaves(state)

    cache, everything = map(_nbytes, jax.eval_shape(empty))
    return cache // (rows * pages) * rows * own_pages, everything - cache


def _nbytes(leaves: list[Any]) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def _layer(share: Share, plan: Deployment, M: int, form: str) -> tuple[int, int]:
    """What a layer works in for M tokens of the device, and of that the exchange's buffers."""
    c, layout = share.shapes.config, share.layout
    D = c.hidden_size
    H = c.num_attention_heads // layout.num_shards("heads")
    C, V, width = c.kv_lora_rank, c.v_head_dim, c.qk_head_dim
    if form == "absorbed":
        # Queries of both forms, sums of latents and of values.
        attention = M * H * (2 * 2 * width + 4 * C + 2 * C + 4 * C + 4 * V)
    else:
        # Queries in parts and whole, keys, values, results; float32 sums over cached tokens, of
        # which some are expanded at a time.
        attention = M * H * (3 * 2 * width + 2 * 2 * V + 2 * 4 * V)
        attention += _CONTEXT_TOKENS * H * 2 * (width + V)
    if not plan.target.chip.kernels:
        attention += _scores(share, plan, M, form)
    exchange, at_once = _exchanged(share, layout, M)[1], _pairs(share, layout, M)
    if layout.mesh.size == 1:
        # Results of pairs, sorted, in the order of tokens, and with padding masked.
        pairs = at_once * 6 * D
    else:
        # A pair's row or result beside its hidden numbers; of tokens that are not exchanged, sums
        # in float32 before and behind an all-reduce, and those of the shared experts.
        hidden = c.moe_intermediate_size // layout.num_shards("expert_ffn")
        pairs = at_once * (2 * D + 2 * hidden) + (0 if exchange else 3 * 4 * M * D)
    if plan.target.platform == "tpu":
        pairs = max(pairs, _summed_on_tpu(share, layout, M))
    return max(attention, pairs) + 3 * 2 * M * D, exchange


def _scores(share: Share, plan: Deployment, M: int, form: str) -> int:
    """Bytes of attention without kernels, which has all scores of a layer in memory at once: in
    float32 and, as probabilities, in bfloat16. An estimate; no such GPU has been measured."""
    c, layout = share.shapes.config, share.layout
    H = c.num_attention_heads // layout.num_shards("heads")
    rows = share.own_rows(plan.batch)
    if form == "absorbed":
        own_tokens = -(-plan.context // layout.num_shards("cached_tokens"))
        # The cached tokens are gathered from their pages, and masked in a copy.
        return M * H * own_tokens * (4 + 2) + 2 * 2 * rows * own_tokens * c.latent_dim
    chunk = min(plan.prefill_chunk, plan.context)
    return M * H * max(chunk, _CONTEXT_TOKENS // max(rows, 1)) * (4 + 2)


def _summed_on_tpu(share: Share, layout: Layout, M: int) -> int:
    """Beside the exchange's buffers, what XLA for TPUs gathers before it sums a token's pairs,
    whose number it pads to tiles of 8. On a GPU one kernel gathers and sums."""
    c = share.shapes.config
    D, K = c.hidden_size, c.num_experts_per_tok
    padded = -(-K // _SUBLANES) * _SUBLANES
    (held, exchange), at_once = _exchanged(share, layout, M), _pairs(share, layout, M)
    if at_once >= held * K:
        # In float32 when the exchange's buffers are given back; of a padded number beside the
        # results as they came.
        results = 4 * D * held * padded + (2 * D * at_once if padded > K else 0)
        return results - exchange
    # By pieces of the pairs, each gathered for all tokens and added; then what came back, beside
    # the sum before and behind, and the shared experts'.
    piece = 2 * D * (held * padded + at_once) + 4 * D * held
    return max(piece, 4 * D * M * padded + 3 * 4 * D * M)


def _exchanged(share: Share, layout: Layout, M: int) -> tuple[int, int]:
    """Tokens that lie on the device for its experts, and the bytes of what brings them there and
    back: see :mod:`sharding.expert_parallel`."""
    c = share.shapes.config
    D, K = c.hidden_size, c.num_experts_per_tok
    exchanged = layout.exchange_axes
    n = math.prod(layout.mesh.shape[a] for a in exchanged)
    if n == 1:
        return M, 0
    row, total = row_bytes(share, layout), 4 * D
    if layout.exchange == "all_gather":
        held, sent, returned = n * M, M, M
    elif layout.exchange == "all_to_all":
        held = n * default_capacity(M, K, layout.num_shards("expert"))
        sent = returned = held
    elif layout.exchange == "one_sided":
        held = sent = returned = n * M
    else:
        held, sent = n * M, M * min(n, K)
        returned = sent
    unpacked = held * 2 * D
    return held, (sent + held) * row + unpacked + (held + returned) * total


def _pairs(share: Share, layout: Layout, M: int) -> int:
    """(token, expert) pairs that the device computes at once."""
    K = share.shapes.config.num_experts_per_tok
    held, _ = _exchanged(share, layout, M)
    exchanged = layout.exchange_axes
    if not exchanged or layout.exchange == "all_gather":
        return held * K
    different = M * math.prod(layout.mesh.shape[a] for a in exchanged)
    return min(held * K, default_pairs_per_call(different, K, layout.num_shards("expert")))


def row_bytes(share: Share, layout: Layout) -> int:
    """Of a token and its routing on their way: see :class:`sharding.token_packer.TokenPacker`."""
    D, K = share.shapes.config.hidden_size, share.shapes.config.num_experts_per_tok
    values = D + 4 * D // FLOAT8_BLOCK[1] if layout.float8_dispatch else 2 * D
    return values + 8 * K


def _dequantized(share: Share, plan: Deployment, M: int, but: str | None = None) -> int:
    """Matrices whose products take many rows in bfloat16, which XLA makes once, before its loop.
    Of experts its product then takes each row beside every matrix.

    Args:
      but: not those of this name.
    """
    if plan.quantization == "bf16" or plan.target.platform == "tpu":
        return 0  # a TPU's kernels read weights as they are stored, whatever the rows
    kernels = plan.target.chip.kernels
    if plan.activations and kernels:
        return 0
    pairs = _pairs(share, share.layout, M)
    total = spread = 0
    for part in share.parts:
        rows = pairs if "experts" in part.path else M
        stored = part.is_matrix and part.dtype.itemsize == 1 and but not in part.path
        if stored and (not kernels or _too_many(part, rows)):
            total += 2 * part.elements
            if "experts" in part.path:
                columns = part.elements // math.prod(part.shape[:-1])
                spread = max(spread, 2 * part.shape[0] * pairs * columns)
    return total + spread


def _tiled(share: Share, plan: Deployment, but: str) -> int:
    """A TPU7x multiplies bfloat16 in tiles of 16 x 128 where a program's arguments lie in tiles of
    8 x 128: XLA copies what its own products read once, before its loop. Experts' kernels read
    them as they lie.

    Args:
      but: not those of this name.
    """
    if plan.target.kind != "tpu7x":
        return 0
    return sum(
        part.nbytes
        for part in share.parts
        if part.is_matrix and part.dtype == jnp.bfloat16 and not {but, "experts"} & {*part.path}
    )


def _too_many(part: Part, rows: int) -> bool:
    try:
        check_few(rows, math.prod(part.shape[:-2]), part.dtype)
    except NotImplementedError:
        return True
    return False
