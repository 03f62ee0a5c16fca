"""Formulas for the temporary arrays of a pass through the network, in bytes on one device.

Their constants are those of XLA's programs. benchmarks/results has the measurements that they are
checked against.

Letters: M tokens on one device; H its heads; D, C, V and K as in the model (hidden size, latent
rank, value width, experts per token).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp

from dsv3_jax.layers.indexer import SCORE_BYTES
from dsv3_jax.layers.paged_cache import Form
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.weights import ModelShard
from pallas_kernels.grouped_matmul.mosaic_gpu import has_many_rows
from pallas_kernels.grouped_matmul.w4a8 import check_widths
from pallas_kernels.top_k.threshold import CHUNK_BYTES
from sharding import Layout, default_capacity, default_pairs_per_call
from sharding.token_packer import FLOAT8_BLOCK

_SAMPLING_BYTES = 41
"""Bytes per logit: the float32 itself, and what sorting a vocabulary for top-k and top-p takes."""

_SUBLANES = 8  # rows of a TPU's float32 tile

_SORTED_SCORES = 3
"""Arrays as large as the scores of an indexer that XLA takes to sort them, themselves included."""

_EXPANDED_TOKENS = 4096  # cached tokens whose keys and values a prefill chunk expands at a time


def sampling_bytes(shard: ModelShard, rows: int) -> int:
    """Returns the bytes of the logits of ``rows`` tokens and of sampling from them."""
    return _SAMPLING_BYTES * rows * shard.shapes.config.vocab_size


def layer_bytes(
    shard: ModelShard, deployment: Deployment, tokens: Sequence[tuple[Form, int]]
) -> tuple[int, int]:
    """Returns the bytes of a layer's temporary arrays: without the exchange's buffers, and those
    buffers.

    Args:
      tokens: form of attention and number of tokens of each batch. All pass the other parts of the
        layer together.
    """
    c, layout = shard.shapes.config, shard.layout
    D, M = c.hidden_size, sum(count for _, count in tokens)
    attention = max(_attention_bytes(shard, deployment, count, form) for form, count in tokens)
    _, exchange = _received_tokens(shard, layout, M)
    pairs_per_call = _pairs(shard, layout, M)
    if layout.mesh.size == 1:
        # Results of pairs: sorted by expert, in the order of tokens, and with padding masked.
        pairs = pairs_per_call * 6 * D
    else:
        # The input or result of each pair, and its hidden activations. Without an exchange also
        # float32 sums before and after an all-reduce, and those of the shared experts.
        hidden = c.moe_intermediate_size // layout.num_shards("expert_ffn")
        pairs = pairs_per_call * (2 * D + 2 * hidden) + (0 if exchange else 3 * 4 * M * D)
    if deployment.target.platform == "tpu":
        pairs = max(pairs, _tpu_sum_bytes(shard, layout, M))
    return max(attention, pairs) + 3 * 2 * M * D, exchange


def _attention_bytes(shard: ModelShard, deployment: Deployment, M: int, form: Form) -> int:
    """Returns the bytes of attention's temporary arrays."""
    c, layout = shard.shapes.config, shard.layout
    H = c.num_attention_heads // layout.num_shards("heads")
    C, V, width = c.kv_lora_rank, c.v_head_dim, c.qk_head_dim
    if form == "absorbed":
        # Queries in both forms, sums of latents and of values.
        attention = M * H * (2 * 2 * width + 4 * C + 2 * C + 4 * C + 4 * V)
    else:
        # bfloat16: queries in parts and whole, keys, values, results. float32: two running sums of
        # values. The keys and values of cached tokens are expanded in blocks.
        attention = M * H * (3 * 2 * width + 2 * 2 * V + 2 * 4 * V)
        attention += _EXPANDED_TOKENS * H * 2 * (width + V)
    if not deployment.target.chip.has_kernels:
        attention += _score_bytes(shard, deployment, M, form)
    return attention + _selection_bytes(shard, deployment, M)


def _selection_bytes(shard: ModelShard, deployment: Deployment, M: int) -> int:
    """Returns the bytes of the scores of an indexer and of selecting the largest of them.

    The scores of as many queries as fit ``SCORE_BYTES`` are in memory at a time, but at least those
    of one query per sequence. XLA sorts them together with their positions; our kernel for GPUs
    reads them where they are, and so do our operations for TPUs, which also have intermediate
    results for some queries at a time.
    """
    topk, context = shard.shapes.config.index_topk, deployment.max_len
    if topk is None or context <= topk:
        return 0
    of_a_query = 4 * context * shard.local_batch(deployment.batch)
    scores = min(4 * context * M, max(SCORE_BYTES, of_a_query))
    if deployment.target.platform == "tpu":
        return scores + CHUNK_BYTES
    has_kernel = deployment.target.platform == "gpu" and deployment.target.chip.has_kernels
    return (1 if has_kernel else _SORTED_SCORES) * scores


def _score_bytes(shard: ModelShard, deployment: Deployment, M: int, form: Form) -> int:
    """Returns the bytes that attention takes without kernels, in addition.

    All scores of a layer are in memory at once, in float32 and, as probabilities, in bfloat16. This
    is an estimate: no such GPU has been measured.
    """
    c, layout = shard.shapes.config, shard.layout
    H = c.num_attention_heads // layout.num_shards("heads")
    batch = shard.local_batch(deployment.batch)
    if form == "absorbed":
        local_tokens = -(-deployment.context // layout.num_shards("cached_tokens"))
        # The cached tokens are gathered from their pages, and masked in a copy.
        return M * H * local_tokens * (4 + 2) + 2 * 2 * batch * local_tokens * c.latent_dim
    chunk = deployment.chunk_tokens
    return M * H * max(chunk, _EXPANDED_TOKENS // max(batch, 1)) * (4 + 2)


def _tpu_sum_bytes(shard: ModelShard, layout: Layout, M: int) -> int:
    """Returns the bytes that XLA for TPUs takes to sum the results of each token's pairs.

    XLA gathers the pairs first and pads their number per token to a multiple of 8. On a GPU one
    kernel gathers and sums. The exchange's buffers are not included.
    """
    c = shard.shapes.config
    D, K = c.hidden_size, c.num_experts_per_tok
    padded = -(-K // _SUBLANES) * _SUBLANES
    received, exchange = _received_tokens(shard, layout, M)
    pairs_per_call = _pairs(shard, layout, M)
    if pairs_per_call >= received * K:
        # All pairs at once, in float32, when the exchange's buffers are already free. If K is
        # padded, the results before the gather remain.
        results = 4 * D * received * padded + (2 * D * pairs_per_call if padded > K else 0)
        return results - exchange
    # Parts of the pairs in turn, each gathered for all tokens and added. Afterwards the returned
    # results, with the sum before and after, and the sum of the shared experts.
    part = 2 * D * (received * padded + pairs_per_call) + 4 * D * received
    return max(part, 4 * D * M * padded + 3 * 4 * D * M)


def _received_tokens(shard: ModelShard, layout: Layout, M: int) -> tuple[int, int]:
    """Returns the number of tokens on the device after dispatch, and the bytes of the exchange.

    See :mod:`sharding.expert_parallel`.
    """
    c = shard.shapes.config
    D, K = c.hidden_size, c.num_experts_per_tok
    exchange_axes = layout.exchange_axes
    n = math.prod(layout.mesh.shape[a] for a in exchange_axes)
    if n == 1:
        return M, 0
    token, result = token_bytes(shard, layout), 4 * D
    if layout.exchange == "all_gather":
        received, sent, returned = n * M, M, M
    elif layout.exchange == "all_to_all":
        received = n * default_capacity(M, K, layout.num_shards("expert"))
        sent = returned = received
    elif layout.exchange == "one_sided":
        received = sent = returned = n * M
    else:
        received, sent = n * M, M * min(n, K)
        returned = sent
    unpacked = received * 2 * D
    return received, (sent + received) * token + unpacked + (received + returned) * result


def _pairs(shard: ModelShard, layout: Layout, M: int) -> int:
    """Returns the number of (token, expert) pairs that the device computes at once."""
    K = shard.shapes.config.num_experts_per_tok
    received, _ = _received_tokens(shard, layout, M)
    exchange_axes = layout.exchange_axes
    if not exchange_axes or layout.exchange == "all_gather":
        return received * K
    different = M * math.prod(layout.mesh.shape[a] for a in exchange_axes)
    return min(received * K, default_pairs_per_call(different, K, layout.num_shards("expert")))


def token_bytes(shard: ModelShard, layout: Layout) -> int:
    """Returns the bytes that the exchange sends for one token and its routing.

    See :class:`sharding.token_packer.TokenPacker`.
    """
    D, K = shard.shapes.config.hidden_size, shard.shapes.config.num_experts_per_tok
    values = D + 4 * D // FLOAT8_BLOCK[1] if layout.float8_dispatch else 2 * D
    return values + 8 * K


def dequantized_bytes(
    shard: ModelShard, deployment: Deployment, M: int, except_for: str | None = None
) -> int:
    """Returns the bytes of the bfloat16 copies of quantized weights.

    XLA makes them once, before its loop, for the matrices that have too many tokens for the kernels
    that read weights as stored. Without a kernel for the experts in bfloat16, its ragged dot then
    pairs each token with every matrix.

    Args:
      except_for: name of a layer that this pass does not use.
    """
    if deployment.quantization == "bf16" or deployment.target.platform == "tpu":
        return 0  # a TPU's kernels read weights as stored, for any number of tokens
    has_kernels = deployment.target.chip.has_kernels
    if deployment.activations and has_kernels and deployment.quantization == "fp8":
        return 0
    pairs = _pairs(shard, shard.layout, M)
    copies = largest_ragged_dot = 0
    for parameter in shard.parameters:
        is_expert = "experts" in parameter.path
        is_quantized = parameter.is_matrix and parameter.dtype.itemsize == 1
        if not is_quantized or except_for in parameter.path:
            continue
        takes_float8 = deployment.activations and has_kernels and is_expert
        if takes_float8 and _has_w4a8_kernel(parameter.shape):
            continue
        rows, groups = pairs if is_expert else M, math.prod(parameter.shape[:-2])
        if not has_kernels or has_many_rows(rows, groups):
            copies += 2 * parameter.elements
            columns = parameter.elements // math.prod(parameter.shape[:-1])
            is_regular = parameter.shape[-2] % 64 == columns % 64 == 0
            if is_expert and not (has_kernels and is_regular and not takes_float8):
                ragged_dot = 2 * parameter.shape[0] * pairs * columns
                largest_ragged_dot = max(largest_ragged_dot, ragged_dot)
    return copies + largest_ragged_dot


def tiled_bytes(shard: ModelShard, deployment: Deployment, except_for: str | None = None) -> int:
    """Returns the bytes of the second copies that XLA makes on a TPU7x.

    A TPU7x multiplies bfloat16 in tiles of 16 x 128, but a program's arguments have tiles of 8 x
    128. XLA copies every matrix of its own matmuls once, before its loop. The experts' kernels read
    the arguments directly.

    Args:
      except_for: name of a layer that this pass does not use.
    """
    if deployment.target.kind != "tpu7x":
        return 0
    excluded = {except_for, "experts"}
    return sum(
        parameter.nbytes
        for parameter in shard.parameters
        if parameter.is_matrix
        and parameter.dtype == jnp.bfloat16
        and not excluded & {*parameter.path}
    )


def _has_w4a8_kernel(shape: tuple[int, ...]) -> bool:
    """Returns whether the kernel of float8 rows takes int4 matrices, stored as [E, N, K / 2]."""
    _, N, half = shape
    try:
        check_widths(N, 2 * half)
    except NotImplementedError:
        return False
    return True
