"""Weighted sum of the outputs of one device's experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import gather_rows

ExpertMLP = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], tuple[jax.Array, Partial]]
"""MLP of the local experts: (tokens [R, D], rows int32 [N], group_sizes int32 [E], copies) ->
(hidden [N, F], down).

Its inputs are ``tokens[rows]``, sorted by expert, and its output ``down(hidden)`` [N, D]. The
function ``down`` is linear in each row; it is a pytree of the arrays that it needs. Output rows
past the sum of ``group_sizes`` are undefined. ``copies`` int32 [R, K] are the positions of each
token in ``rows``, if it is there K times, or None; they make the gradient a gather, see
:func:`pallas_kernels.gather_rows`.
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
        hidden, down = expert_mlp(tokens, order // K, group_sizes, position)
        # shard_map's replication check requires weights that vary over the mesh axes of hidden.
        weights = jnp.where(is_local, weights, 0.0)
        return weighted_sum(gather_sum, down, hidden, weights, order, position, is_local)

    step = pairs_per_call
    rows = jnp.pad(order // K, (0, -flat.size % step))
    ends = jnp.cumsum(group_sizes)

    def one_call(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, y = state
        sizes = jnp.diff(jnp.clip(ends - start, 0, step), prepend=0)
        some = jax.lax.dynamic_slice(rows, (start,), (step,))
        hidden, down = expert_mlp(tokens, some, sizes, None)
        is_inside = is_local & (position >= start) & (position < start + step)
        return start + step, y + gather_sum(down(hidden), position - start, is_inside, weights)

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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted_sum(
    sum_rows: Callable[..., jax.Array],
    down: Partial,
    hidden: Float[Array, "N F"],
    weights: Float32[Array, "M K"],
    order: Int32[Array, " N"],
    position: Int32[Array, "M K"],
    keep: Bool[Array, "M _"] | None,
) -> Float32[Array, "M D"]:
    """Computes ``y_m = sum_k weight_mk down(hidden)[position_mk]`` over the k with ``keep_mk``, in
    float32.

    Its gradients only gather, so that they have a fixed order. They need ``hidden`` but not
    ``down(hidden)``, because ``down`` is linear: with the cotangent d of y, that of hidden row p of
    token m is ``weight * down^T(d_m)``, and that of the weight is ``down^T(d_m) . hidden_p``. d is
    rounded to the dtype of ``hidden`` first.

    Args:
      sum_rows: function (rows, position, keep, weights) that computes y from ``down(hidden)``.
      down: see :data:`ExpertMLP`.
      order: pair, numbered ``m K + k``, of each row: the inverse of ``position``. N is M K.
      keep: [M, K] or [M, 1]; None keeps all.
    """
    return sum_rows(down(hidden), position, keep, weights)


def _forward(
    sum_rows: Callable[..., jax.Array],
    down: Partial,
    hidden: jax.Array,
    weights: jax.Array,
    order: jax.Array,
    position: jax.Array,
    keep: jax.Array | None,
) -> tuple[jax.Array, Any]:
    # jax.vjp: as in a forward pass before a backward pass, which quantised matrices are told.
    y = sum_rows(jax.vjp(down, hidden)[0], position, keep, weights)
    return y, (down, hidden, weights, order, position, keep)


def _backward(sum_rows: Callable[..., jax.Array], saved: Any, cotangent: jax.Array) -> tuple:
    del sum_rows
    down, hidden, weights, order, position, keep = saved
    is_kept = True  # without an operation on rows
    if keep is not None:
        is_kept = jnp.broadcast_to(keep, weights.shape).reshape(-1)[order][:, None]
    weight_of_row = weights.reshape(-1)[order][:, None]
    d_y = gather_rows(cotangent.astype(hidden.dtype), order // weights.shape[1])
    # Rows that are not kept may be NaN.
    d_y, rows = jnp.where(is_kept, d_y, 0), jnp.where(is_kept, hidden, 0)
    # Without a barrier, XLA would convert the rows in the forward pass and keep them in float32.
    rows_after, _ = jax.lax.optimization_barrier((rows, d_y))
    weighted = (rows_after.astype(jnp.float32) * weight_of_row).astype(hidden.dtype)
    _, transpose = jax.vjp(lambda down, hidden: down(hidden), down, weighted)
    d_down, d_rows = transpose(d_y)
    d_rows = jnp.where(is_kept, d_rows, 0).astype(jnp.float32)
    d_weights = jnp.sum(d_rows * rows.astype(jnp.float32), axis=1)[position]
    d_hidden = (d_rows * weight_of_row).astype(hidden.dtype)
    return d_down, d_hidden, d_weights, None, None, None


weighted_sum.defvjp(_forward, _backward)


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
