"""What one device does with the tokens it was given: its own experts' weighted sum."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

Run = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""The local experts' MLP: ``run(tokens [R, D], rows int32 [N], group_sizes int32 [E]) -> [N, D]``.

Of ``tokens[rows]``, sorted by expert. Rows past the sum of ``group_sizes`` are undefined.
"""


def mix_local(
    tokens: Float[Array, "R D"],
    experts: Int32[Array, "R K"],
    weights: Float32[Array, "R K"],
    run: Run,
    num_experts: int,
    pairs_at_once: int | None = None,
) -> Float32[Array, "R D"]:
    """``y_r = sum_k weight_rk expert_rk(x_r)`` over this device's experts, in float32.

    Args:
      experts: local numbers; outside 0 .. num_experts - 1 stands "not here", which adds nothing.
      pairs_at_once: (token, expert) pairs that ``run`` takes in one call; as many calls follow as
        the pairs that are here need. None: all R * K at once, in one call, which alone has a
        gradient.
    """
    K = experts.shape[1]
    here = (experts >= 0) & (experts < num_experts)
    flat = jnp.where(here, experts, num_experts).reshape(-1)
    order, place = _sorted_places(flat)
    place = place.reshape(experts.shape)
    group_sizes = jnp.sum(jnp.arange(num_experts)[:, None] == flat, axis=1, dtype=jnp.int32)
    if pairs_at_once is None or pairs_at_once >= flat.size:
        out = run(tokens, order // K, group_sizes)
        return gather_sum(out, place, here, weights)

    step = pairs_at_once
    rows = jnp.pad(order // K, (0, -flat.size % step))
    ends = jnp.cumsum(group_sizes)

    def piece(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, y = state
        sizes = jnp.diff(jnp.clip(ends - start, 0, step), prepend=0)
        out = run(tokens, jax.lax.dynamic_slice(rows, (start,), (step,)), sizes)
        inside = here & (place >= start) & (place < start + step)
        return start + step, y + gather_sum(out, place - start, inside, weights)

    # The sum starts from what the pieces vary over, as shard_map's check of replication wants it.
    zero = 0 * ends[-1]
    y = jnp.broadcast_to(zero.astype(jnp.float32), tokens.shape)
    return jax.lax.while_loop(lambda state: state[0] < ends[-1], piece, (zero, y))[1]


def gather_sum(
    rows: Float[Array, "N D"],
    index: Int32[Array, "M K"],
    keep: Bool[Array, "M K"],
    weights: Float32[Array, "M K"] | None = None,
) -> Float32[Array, "M D"]:
    """``y_m = sum_k weight_mk rows[index_mk]`` over the k to be kept, in float32.

    Gathered and not scattered: every token sums in the order of its K, whatever the device.
    """
    # Selected before it is multiplied: what is not kept may be NaN, and 0 * NaN is NaN.
    picked = jnp.where(keep[..., None], rows[jnp.where(keep, index, 0)].astype(jnp.float32), 0.0)
    if weights is not None:
        picked *= jnp.where(keep, weights, 0.0)[..., None]
    return jnp.sum(picked, axis=1)


_COUNTED = 4096  # keys, of which comparing each with each is cheaper to a GPU than sorting twice


def _sorted_places(keys: Int32[Array, " N"]) -> tuple[Int32[Array, " N"], Int32[Array, " N"]]:
    """A stable sort's order, and where each key stands in it."""
    numbers = jnp.arange(len(keys), dtype=jnp.int32)
    if len(keys) > _COUNTED:
        order = _argsort(keys, numbers)
        return order, _argsort(order, numbers)
    ahead = (keys < keys[:, None]) | ((keys == keys[:, None]) & (numbers < numbers[:, None]))
    place = jnp.sum(ahead, axis=1, dtype=jnp.int32)
    return numbers.at[place].set(numbers, unique_indices=True), place


def _argsort(keys: Int32[Array, " N"], numbers: Int32[Array, " N"]) -> Int32[Array, " N"]:
    """Stable. Not jnp.argsort: what that returns no longer varies over shard_map's axes to jax
    (0.10 to 0.12), and a gradient through ``x[argsort(y)]`` comes out wrong."""
    return jax.lax.sort((keys, numbers), num_keys=1, is_stable=True)[1]
