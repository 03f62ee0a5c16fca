"""Bodies of the exchanges: rows to the devices that compute them, and shares back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt

from pallas_kernels import token_exchange
from sharding.expert_mixture import gather_sum
from sharding.parcel import Parcel
from sharding.token_queues import Queues, ragged_slices

Mix = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""This device's share of any tokens: (tokens, experts, weights) -> [R, D]."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gathered(
    parcel: Parcel,
    axes: tuple[str, ...],
    tokens: Float[Array, "M D"],
    experts: Int32[Array, "M K"],
    weights: Float32[Array, "M K"],
) -> tuple[Float[Array, "R D"], Int32[Array, "R K"], Float32[Array, "R K"]]:
    """All devices' tokens, experts and weights, in the order of the devices: one all-gather.

    The gradient is written here because bits have none: one reduce-scatter, in float32.
    """
    if not axes and not parcel.float8:
        return tokens, experts, weights
    rows = parcel.pack(tokens, experts, weights)
    # Without an exchange between, XLA for GPUs would leave the rounding to float8 out.
    rows = lax.all_gather(rows, axes, tiled=True) if axes else lax.optimization_barrier(rows)
    return parcel.unpack(rows)


def _gathered_forward(
    parcel: Parcel, axes: tuple[str, ...], *routed: jax.Array
) -> tuple[tuple[jax.Array, ...], None]:
    return gathered(parcel, axes, *routed), None


def _gathered_backward(
    parcel: Parcel, axes: tuple[str, ...], residuals: None, cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, None, jax.Array]:
    d_tokens, _, d_weights = cotangents
    if axes:
        both = jnp.concatenate([d_tokens.astype(jnp.float32), d_weights], axis=1)
        both = lax.psum_scatter(both, axes, scatter_dimension=0, tiled=True)
        d_tokens, d_weights = jnp.split(both, [parcel.hidden_size], axis=1)
    return d_tokens.astype(parcel.dtype), None, d_weights


gathered.defvjp(_gathered_forward, _gathered_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def without_gradient(
    exchange: str, tokens: Float[Array, "M D"], weights: Float32[Array, "M K"]
) -> tuple[Float[Array, "M D"], Float32[Array, "M K"]]:
    """The same arrays. Their gradient is refused, which would otherwise be silently zero."""
    return tokens, weights


def _refuse(exchange: str, tokens: jax.Array, weights: jax.Array) -> NoReturn:
    raise NotImplementedError(f"{exchange} has no gradient; all_gather has one")


without_gradient.defvjp(_refuse, _refuse)


def in_rounds(
    rows: UInt[Array, "M1 W"],
    queues: Queues,
    parcel: Parcel,
    mix: Mix,
    axes: tuple[str, ...],
    capacity: int,
) -> Float32[Array, "M D"]:
    """Two all-to-alls a round, of ``capacity`` rows for each device, until all queues are empty.

    Args:
      rows: the tokens' parcels, and last the one that fills places without a token.
    """
    M, devices = len(rows) - 1, len(queues.counts)
    most = -(-M // capacity)
    slots = queues.destination * (most * capacity) + queues.place
    sent = queues.tokens_at(slots, devices * most * capacity).reshape(devices, -1)

    def one_round(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        done, y = state
        now = lax.dynamic_slice_in_dim(sent, done, capacity, axis=1)
        there = lax.all_to_all(rows[now.reshape(-1)], axes, 0, 0, tiled=True)
        shares = mix(*parcel.unpack(there))
        back = lax.all_to_all(shares, axes, 0, 0, tiled=True)
        place = queues.place - done
        keep = queues.leads & (place >= 0) & (place < capacity)
        return done + capacity, y + gather_sum(back, queues.destination * capacity + place, keep)

    y = jnp.zeros((M, parcel.hidden_size), jnp.float32)
    if most == 1:
        return one_round((jnp.int32(0), y))[1]
    # All devices of the mesh take as many rounds, also those that exchange nothing with each other:
    # no collective then waits for a device that has left the loop.
    everyone = jax.sharding.get_abstract_mesh().manual_axes
    longest = lax.pmax(jnp.max(queues.counts), everyone)
    # The sum starts from what the rounds vary over, as shard_map's check of replication wants it.
    y += 0 * (queues.place[:, :1] + lax.axis_index(axes))
    return lax.while_loop(lambda state: state[0] < longest, one_round, (jnp.int32(0), y))[1]


def ragged(
    rows: UInt[Array, "M1 W"],
    queues: Queues,
    parcel: Parcel,
    mix: Mix,
    axes: tuple[str, ...],
) -> Float32[Array, "M D"]:
    """Two ragged all-to-alls of exact length, and before them an all-gather of the lengths.

    Args:
      rows: as of :func:`in_rounds`.
    """
    (M, K), devices = queues.place.shape, len(queues.counts)
    counts = lax.all_gather(queues.counts, axes)
    there, back = ragged_slices(counts, lax.axis_index(axes))
    slots = queues.starts()[queues.destination] + queues.place
    sent = rows[queues.tokens_at(slots, M * min(devices, K))]
    # At most every token of every device comes here. Where none does, a row without an expert lies.
    room = jnp.broadcast_to(rows[-1], (devices * M, rows.shape[1]))
    arrived = lax.ragged_all_to_all(sent, room, *there, axis_name=axes)
    shares = mix(*parcel.unpack(arrived))
    room = jnp.zeros((len(sent), shares.shape[1]), shares.dtype)
    returned = lax.ragged_all_to_all(shares, room, *back, axis_name=axes)
    return gather_sum(returned, slots, queues.leads)


def one_sided(
    rows: UInt[Array, "M1 W"],
    queues: Queues,
    parcel: Parcel,
    mix: Mix,
    axes: tuple[str, ...],
) -> Float32[Array, "M D"]:
    """Each device stores its rows into the others' memory, as many as there are, and their shares
    come back the same way.

    Args:
      rows: as of :func:`in_rounds`.
    """
    M, devices = len(rows) - 1, len(queues.counts)
    slots = queues.destination * M + queues.place
    sent = rows[queues.tokens_at(slots, devices * M)].reshape(devices, M, -1)
    there, counts = token_exchange(sent, queues.counts, axes=axes)
    tokens, experts, weights = parcel.unpack(there.reshape(devices * M, -1))
    # Behind the rows that came lie any bits: tokens of no expert.
    came = (jnp.arange(M) < counts[:, None]).reshape(-1, 1)
    shares = mix(tokens, jnp.where(came, experts, -1), weights)
    back, _ = token_exchange(shares.reshape(devices, M, -1), counts, axes=axes)
    return gather_sum(back.reshape(devices * M, -1), slots, queues.leads)
