"""route on GPUs without the Hopper kernel: ranks by comparing and positions by counting, no sorts.

XLA sorts in several passes over all pairs, three times in the reference: for the largest scores,
for ``order`` and for ``inverse``. Here an expert's rank is the number of experts that precede it,
and a pair's position is the number of pairs before it: the pairs of lower experts, and the earlier
tokens that chose the same expert. The results are those of the reference, ties included.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from pallas_kernels.residuals import named
from pallas_kernels.route.reference import Routes, Rule
from pallas_kernels.target import platform

_BLOCK = 128  # tokens of a block, among which one matmul counts the earlier ones


def route(
    logits: Float32[Array, "M E"],
    bias: Float32[Array, " E"] | None,
    valid: Bool[Array, " M"] | None,
    *,
    rule: Rule,
) -> Routes:
    """Implements :func:`pallas_kernels.route`. Raises NotImplementedError unless the program is for
    a GPU."""
    if platform() != "gpu":
        raise NotImplementedError(f"is for GPUs, this is {platform()}")
    return choose_and_count(logits, bias, valid, rule=rule)


def choose_and_count(
    logits: Float32[Array, "M E"],
    bias: Float32[Array, " E"] | None,
    valid: Bool[Array, " M"] | None,
    *,
    rule: Rule,
) -> Routes:
    """Does :func:`route` on any platform."""
    M, E = logits.shape
    K = rule.num_experts_per_tok
    scores = rule.scores(logits)
    choice = jax.lax.stop_gradient(scores if bias is None else scores + bias)
    rank = _rank(_mask_groups(choice, rule))
    experts = named("routes", _of_ranks(rank, jnp.arange(E)[None], K))
    weights = rule.weights(scores, experts)

    members = rank < K
    if valid is not None:
        members &= valid[:, None]
    earlier, sizes = _earlier(members)
    firsts = jnp.sum(jnp.where(jnp.tri(E, k=-1, dtype=bool), sizes, 0), axis=1)
    inverse = _of_ranks(rank, firsts + earlier, K)
    if valid is not None:
        # Pairs of invalid tokens come after all others. A valid token has K pairs.
        earlier_invalid = jnp.arange(M) - jnp.sum(earlier, axis=1) // K
        last = jnp.sum(sizes) + K * earlier_invalid[:, None] + jnp.arange(K)
        inverse = jnp.where(valid[:, None], inverse, last)
    inverse = inverse.reshape(-1)
    order = jnp.zeros((M * K,), jnp.int32)
    order = order.at[inverse].set(jnp.arange(M * K), unique_indices=True)
    return Routes(scores, experts, weights, order, inverse, sizes)


def _rank(values: Float32[Array, "*rows E"]) -> Int[Array, "*rows E"]:
    """Returns how many entries of the row precede each one in ``lax.top_k``'s order."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    # Integers in the total order of the floats: -0 comes before +0, a positive NaN after infinity.
    keys = jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)
    key, other = keys[..., :, None], keys[..., None, :]
    E = values.shape[-1]
    is_lower = jnp.tri(E, k=-1, dtype=bool)  # [key, other]: the other has the lower index
    precedes = (other > key) | ((other == key) & is_lower)
    return jnp.sum(precedes, axis=-1, dtype=jnp.int32)


def _of_ranks(rank: Int[Array, "*rows E"], values: Int[Array, "_ E"], K: int) -> Int[Array, "_ _"]:
    """Returns the values of the entries with ranks 0 to K - 1, in the order of the ranks."""
    is_rank = rank[..., None, :] == jnp.arange(K)[:, None]
    return jnp.sum(jnp.where(is_rank, values[..., None, :], 0), axis=-1, dtype=jnp.int32)


def _mask_groups(choice: Float32[Array, "M E"], rule: Rule) -> Float32[Array, "M E"]:
    """Does :meth:`Rule.mask_groups`."""
    if rule.n_group == 1:
        return choice
    grouped = choice.reshape(len(choice), rule.n_group, -1)
    if rule.method == "noaux_tc":
        rank = _rank(grouped)
        best, second = (jnp.sum(jnp.where(rank == i, grouped, 0.0), axis=-1) for i in (0, 1))
        group_scores = best + second
    else:
        group_scores = jnp.max(grouped, axis=-1)
    is_open = _rank(group_scores) < rule.topk_group
    return jnp.where(is_open[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


def _earlier(
    members: Bool[Array, "M columns"],
) -> tuple[Int[Array, "M columns"], Int[Array, " columns"]]:
    """Returns for each column the number of members above each row, and that of all members.
    Matmuls count: sums of zeros and ones up to 2^24 are exact in float32."""
    M, columns = members.shape
    blocks = -(-M // _BLOCK)
    padded = jnp.pad(members, ((0, blocks * _BLOCK - M), (0, 0)))
    padded = padded.reshape(blocks, _BLOCK, columns)
    # The CPU has no matmul of bfloat16 by bfloat16 with a result in float32 in every version.
    dtype = jnp.bfloat16 if platform() == "gpu" else jnp.float32
    # One matrix per block, so that the result needs no transposition.
    above = jnp.broadcast_to(jnp.tri(_BLOCK, k=-1, dtype=dtype), (blocks, _BLOCK, _BLOCK))
    inside = jnp.einsum(
        "bts,bsc->btc", above, padded.astype(dtype), preferred_element_type=jnp.float32
    )
    of_block = jnp.sum(padded, axis=1, dtype=jnp.int32)
    blocks_above = jnp.tri(blocks, k=-1, dtype=bool)[:, :, None]
    before = jnp.sum(jnp.where(blocks_above, of_block, 0), axis=1, dtype=jnp.int32)
    earlier = inside.astype(jnp.int32) + before[:, None]
    return earlier.reshape(-1, columns)[:M], jnp.sum(of_block, axis=0, dtype=jnp.int32)
