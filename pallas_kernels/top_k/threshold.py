"""top_k on TPUs in ordinary XLA operations, without a sort.

A sort of the scores and their positions takes twice the memory of the scores. Here the k-th largest
score is found digit by digit in the bits of the scores, and matmuls with zeros and ones count the
selected scores up to each position and bring their indices to the front. All counts are exact:
zeros, ones and numbers up to 128 are exact in bfloat16, and sums of them in float32. No TPU has run
it yet.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

from pallas_kernels import target

_LANES = 128
_DIGIT_BITS = 4

CHUNK_BYTES = 32 << 20  # bytes of intermediate arrays, for some rows at a time


def top_k(
    scores: Float32[Array, "*batch S"], k: int, *, lengths: Int[Array, "*batch"] | None = None
) -> Int32[Array, "*batch k"]:
    """Implements :func:`pallas_kernels.top_k`, if the program is compiled for TPUs."""
    if (platform := target.platform()) != "tpu":
        raise NotImplementedError(f"runs on TPUs, this is {platform}")
    return select(scores, k, lengths=lengths)


def select(
    scores: Float32[Array, "*batch S"], k: int, *, lengths: Int[Array, "*batch"] | None = None
) -> Int32[Array, "*batch k"]:
    """Computes :func:`pallas_kernels.top_k` on any platform."""
    del lengths  # the scores after them are -inf
    *batch, S = scores.shape
    if 0 in scores.shape:
        return jnp.full((*batch, k), -1, jnp.int32)
    scores = jax.lax.stop_gradient(scores).reshape(-1, S)
    padded = jnp.pad(scores, ((0, 0), (0, -S % _LANES)), constant_values=-jnp.inf)
    rows = min(len(padded), max(1, CHUNK_BYTES // _row_bytes(padded.shape[1], k)))
    if rows == len(padded):
        return _select(padded, k).reshape(*batch, k)

    def select_some(i: Int[Array, ""], indices: Int32[Array, "R k"]) -> Int32[Array, "R k"]:
        # The last rows may overlap those before.
        first = jnp.minimum(i * rows, len(padded) - rows)
        some = jax.lax.dynamic_slice_in_dim(padded, first, rows)
        return jax.lax.dynamic_update_slice_in_dim(indices, _select(some, k), first, axis=0)

    initial = jnp.zeros((len(padded), k), jnp.int32)
    indices = jax.lax.fori_loop(0, -(-len(padded) // rows), select_some, initial)
    return indices.reshape(*batch, k)


def _row_bytes(S: int, k: int) -> int:
    """Returns the bytes of intermediate arrays per row: integers in the order of the scores, and a
    block of each selected score as matmuls read and return it."""
    return 2 * 4 * S + k * (4 * _LANES + 2 * (S // _LANES))


def _select(scores: Float32[Array, "R S"], k: int) -> Int32[Array, "R k"]:
    return _indices(_chosen(scores, k), k)


def _chosen(scores: Float32[Array, "R S"], k: int) -> Bool[Array, "R S"]:
    """Returns which scores are selected."""
    keys = _sortable(scores)
    smallest = _sortable(jnp.asarray(-jnp.inf, jnp.float32))

    def add_digit(i: Int[Array, ""], threshold: UInt32[Array, " R"]) -> UInt32[Array, " R"]:
        """Sets the next digit to the largest with which k keys reach the threshold."""
        shift = jnp.uint32(32 - _DIGIT_BITS) - jnp.uint32(_DIGIT_BITS) * i.astype(jnp.uint32)
        digits = jnp.arange(1, 2**_DIGIT_BITS, dtype=jnp.uint32)
        candidates = threshold[:, None] | (digits << shift)
        reach = keys[:, None, :] >= candidates[..., None]
        counts = jnp.sum(reach, axis=-1, dtype=jnp.int32)
        digit = jnp.sum(counts >= k, axis=-1, dtype=jnp.uint32)
        return threshold | (digit << shift)

    initial = jnp.zeros(len(keys), jnp.uint32)
    threshold = jax.lax.fori_loop(0, 32 // _DIGIT_BITS, add_digit, initial)[:, None]
    above, equal = keys > threshold, keys == threshold
    needed = k - jnp.sum(above, axis=-1, dtype=jnp.int32)
    # The first of equal scores are chosen.
    rank = _counts(equal)
    return (above | (equal & (rank <= needed[:, None]))) & (keys > smallest)


def _indices(chosen: Bool[Array, "R S"], k: int) -> Int32[Array, "R k"]:
    """Returns the positions of chosen scores, in order, then -1. At most k are chosen."""
    R, S = chosen.shape
    in_block = chosen.reshape(R, -1, _LANES)
    ranks = jnp.where(in_block, _counts_in_blocks(in_block), 0)
    ends = _counts_of_blocks(jnp.sum(in_block, axis=-1, dtype=jnp.int32))
    counts = jnp.diff(ends, axis=1, prepend=0)
    output = jnp.arange(k, dtype=jnp.int32)
    # The block of each output, and its rank among the block's chosen scores, from 1 on.
    before = ends[:, None, :] <= output[:, None]
    block = jnp.sum(before, axis=-1, dtype=jnp.int32)
    rank = output + 1 - jnp.sum(jnp.where(before, counts[:, None], 0), axis=-1, dtype=jnp.int32)
    is_block = block[..., None] == jnp.arange(S // _LANES)
    of_block = _exact_matmul(is_block, ranks)  # [R, k, lanes]
    is_lane = of_block == rank[..., None].astype(jnp.float32)
    lane = jnp.sum(jnp.where(is_lane, jnp.arange(_LANES), 0), axis=-1, dtype=jnp.int32)
    return jnp.where(output < ends[:, -1:], block * _LANES + lane, -1)


def _sortable(x: Float32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Returns integers in the order of the numbers. Those of -0 and 0 are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _counts(mask: Bool[Array, "R S"]) -> Int32[Array, "R S"]:
    """Returns how many entries are set up to each one, itself included."""
    blocks = mask.reshape(len(mask), -1, _LANES)
    counts = jnp.sum(blocks, axis=-1, dtype=jnp.int32)
    before = _counts_of_blocks(counts) - counts
    return (before[..., None] + _counts_in_blocks(blocks)).reshape(mask.shape)


def _counts_in_blocks(blocks: Bool[Array, "R blocks lanes"]) -> Int32[Array, "R blocks lanes"]:
    """Returns how many entries of a block are set up to each one, itself included."""
    lane = jnp.arange(_LANES)
    return _exact_matmul(blocks, lane[:, None] <= lane).astype(jnp.int32)


def _counts_of_blocks(counts: Int32[Array, "R blocks"]) -> Int32[Array, "R blocks"]:
    """Returns the sums of the counts up to each block, itself included."""
    block = jnp.arange(counts.shape[1])
    return _exact_matmul(counts, block[:, None] <= block).astype(jnp.int32)


def _exact_matmul(
    a: Bool[Array, "*R I J"] | Int[Array, "*R J"], b: Bool[Array, "J K"] | Int[Array, "R J K"]
) -> Float[Array, "*R _ K"] | Float[Array, "R K"]:
    """Returns the matmul of numbers from 0 to 128, exact if sums are below 2^24."""
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)
