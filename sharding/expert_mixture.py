"""Weighted sum of the outputs of one device's experts."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

ExpertMLP = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""MLP of the local experts: (tokens [R, D], rows int32 [N], group_sizes int32 [E]) -> [N, D].

Its inputs are ``tokens[rows]``, sorted by expert. Output rows past the sum of ``group_sizes`` are
undefined.
"""


def mix_local(
    tokens: Float[Array, "R D"],
    experts: Int32[Array, "R K"],
    weights: Float32[Array, "R K"],
    expert_mlp: ExpertMLP,
    num_experts: int,
    pairs_per_call: int | None = None,
) -> Float32[Array, "R D"]:
    """Computes ``y_r = sum_k weight_rk expert_rk(x_r)`` over this device's experts, in float32.

    Args:
      experts: local expert numbers. A number outside 0 .. num_experts - 1 is an expert of another
        device and adds nothing.
      pairs_per_call: largest number of (token, expert) pairs in one call of ``expert_mlp``. A loop
        makes as many calls as the local pairs need. None computes all R * K pairs in one call;
        only this has a gradient.
    """
    K = experts.shape[1]
    is_local = (experts >= 0) & (experts < num_experts)
    flat = jnp.where(is_local, experts, num_experts).reshape(-1)
    order, position = _sort_positions(flat, num_experts + 1)
    position = position.reshape(experts.shape)
    group_sizes = jnp.sum(jnp.arange(num_experts)[:, None] == flat, axis=1, dtype=jnp.int32)
    if pairs_per_call is None or pairs_per_call >= flat.size:
        out = expert_mlp(tokens, order // K, group_sizes)
        return gather_sum(out, position, is_local, weights)

    step = pairs_per_call
    rows = jnp.pad(order // K, (0, -flat.size % step))
    ends = jnp.cumsum(group_sizes)

    def one_call(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, y = state
        sizes = jnp.diff(jnp.clip(ends - start, 0, step), prepend=0)
        out = expert_mlp(tokens, jax.lax.dynamic_slice(rows, (start,), (step,)), sizes)
        is_inside = is_local & (position >= start) & (position < start + step)
        return start + step, y + gather_sum(out, position - start, is_inside, weights)

    # shard_map's replication check requires the initial sum to vary over the same mesh axes as the
    # loop's result.
    zero = 0 * ends[-1]
    y = jnp.broadcast_to(zero.astype(jnp.float32), tokens.shape)
    return jax.lax.while_loop(lambda state: state[0] < ends[-1], one_call, (zero, y))[1]


def gather_sum(
    rows: Float[Array, "N D"],
    index: Int32[Array, "M K"],
    keep: Bool[Array, "M K"],
    weights: Float32[Array, "M K"] | None = None,
) -> Float32[Array, "M D"]:
    """Computes ``y_m = sum_k weight_mk rows[index_mk]`` over the k with ``keep_mk``, in float32.

    It gathers instead of scattering, so that each token sums in the order of its K on every device.
    """
    # Masked before the multiplication: a row that is not kept may be NaN, and 0 * NaN is NaN.
    picked = jnp.where(keep[..., None], rows[jnp.where(keep, index, 0)].astype(jnp.float32), 0.0)
    if weights is not None:
        picked *= jnp.where(keep, weights, 0.0)[..., None]
    return jnp.sum(picked, axis=1)


# Up to this many keys a GPU compares all pairs of keys faster than it counts in blocks.
_MAX_COMPARED_KEYS = 4096
_BLOCK_KEYS = 256


def _sort_positions(
    keys: Int32[Array, " N"], num_keys: int
) -> tuple[Int32[Array, " N"], Int32[Array, " N"]]:
    """Returns the order of a stable sort, and the position of each key in that order.

    Two sorts in every layer would launch more kernels on a GPU.

    Args:
      keys: numbers from 0 to num_keys - 1.
    """
    numbers = jnp.arange(len(keys), dtype=jnp.int32)
    if len(keys) > _MAX_COMPARED_KEYS:
        position = _count_positions(keys, num_keys)
    else:
        ahead = (keys < keys[:, None]) | ((keys == keys[:, None]) & (numbers < numbers[:, None]))
        position = jnp.sum(ahead, axis=1, dtype=jnp.int32)
    return numbers.at[position].set(numbers, unique_indices=True), position


def _count_positions(keys: Int32[Array, " N"], num_keys: int) -> Int32[Array, " N"]:
    """Returns the position of each key in a stable sort.

    It is the number of smaller keys, plus that of equal keys in earlier blocks, plus that of equal
    keys before it in its own block.
    """
    blocks = jnp.pad(keys, (0, -len(keys) % _BLOCK_KEYS), constant_values=num_keys)
    blocks = blocks.reshape(-1, _BLOCK_KEYS)
    index = jnp.arange(_BLOCK_KEYS)
    is_equal_before = (blocks[:, None] == blocks[:, :, None]) & (index < index[:, None])
    in_block = jnp.sum(is_equal_before, axis=2, dtype=jnp.int32)
    counts = jnp.sum(jnp.arange(num_keys)[:, None] == blocks[:, None], axis=2, dtype=jnp.int32)
    through_block = jnp.cumsum(counts, axis=0)
    smaller = jnp.cumsum(through_block[-1]) - through_block[-1]
    first = smaller + through_block - counts
    # Padding is out of bounds and clipped. It is cut off below.
    position = jnp.take_along_axis(first, blocks, axis=1, mode="clip") + in_block
    return position.reshape(-1)[: len(keys)]
