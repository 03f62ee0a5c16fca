"""Exchanges of tokens between devices, one function per member of :data:`~sharding.Exchange`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt

from pallas_kernels import token_exchange
from sharding.dispatch_table import DispatchTable, ragged_slices
from sharding.expert_mixture import gather_sum
from sharding.token_packer import TokenPacker

LocalMixture = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Computes this device's partial sums of any tokens: (tokens, experts, weights) -> [R, D]."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather_tokens(
    packer: TokenPacker,
    axes: tuple[str, ...],
    tokens: Float[Array, "M D"],
    experts: Int32[Array, "M K"],
    weights: Float32[Array, "M K"],
) -> tuple[Float[Array, "R D"], Int32[Array, "R K"], Float32[Array, "R K"]]:
    """Returns all devices' tokens, experts and weights, in device order, after one all-gather.

    The gradient is one reduce-scatter in float32. It is defined here because packed integers have
    no gradient.
    """
    if not axes and not packer.float8:
        return tokens, experts, weights
    rows = packer.pack(tokens, experts, weights)
    # The barrier keeps XLA for GPUs from removing the rounding to float8.
    rows = lax.all_gather(rows, axes, tiled=True) if axes else lax.optimization_barrier(rows)
    return packer.unpack(rows)


def _gather_forward(
    packer: TokenPacker, axes: tuple[str, ...], *arrays: jax.Array
) -> tuple[tuple[jax.Array, ...], None]:
    return gather_tokens(packer, axes, *arrays), None


def _gather_backward(
    packer: TokenPacker, axes: tuple[str, ...], residuals: None, cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, None, jax.Array]:
    d_tokens, _, d_weights = cotangents
    if axes:
        both = jnp.concatenate([d_tokens.astype(jnp.float32), d_weights], axis=1)
        both = lax.psum_scatter(both, axes, scatter_dimension=0, tiled=True)
        d_tokens, d_weights = jnp.split(both, [packer.hidden_size], axis=1)
    return d_tokens.astype(packer.dtype), None, d_weights


gather_tokens.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def without_gradient(
    exchange: str, tokens: Float[Array, "M D"], weights: Float32[Array, "M K"]
) -> tuple[Float[Array, "M D"], Float32[Array, "M K"]]:
    """Returns its arguments, and raises NotImplementedError where a gradient is taken.

    Without it the gradient through an exchange of integers would silently be zero.
    """
    return tokens, weights


def _refuse(exchange: str, tokens: jax.Array, weights: jax.Array) -> NoReturn:
    raise NotImplementedError(f"{exchange} has no gradient; all_gather has one")


without_gradient.defvjp(_refuse, _refuse)


def exchange_padded(
    rows: UInt[Array, "M1 W"],
    table: DispatchTable,
    packer: TokenPacker,
    mix: LocalMixture,
    axes: tuple[str, ...],
    capacity: int,
) -> Float32[Array, "M D"]:
    """Exchanges messages of ``capacity`` rows by two all-to-alls per round, until all are sent.

    Args:
      rows: packed tokens. One more row follows them: a token without experts, which fills unused
        slots of messages.
    """
    M, devices = len(rows) - 1, len(table.counts)
    max_rounds = -(-M // capacity)
    slots = table.destination * (max_rounds * capacity) + table.position
    sent = table.tokens_by_slot(slots, devices * max_rounds * capacity).reshape(devices, -1)

    def one_round(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, y = state
        tokens = lax.dynamic_slice_in_dim(sent, start, capacity, axis=1)
        received = lax.all_to_all(rows[tokens.reshape(-1)], axes, 0, 0, tiled=True)
        partial_sums = mix(*packer.unpack(received))
        returned = lax.all_to_all(partial_sums, axes, 0, 0, tiled=True)
        position = table.position - start
        keep = table.is_first & (position >= 0) & (position < capacity)
        return (
            start + capacity,
            y + gather_sum(returned, table.destination * capacity + position, keep),
        )

    y = jnp.zeros((M, packer.hidden_size), jnp.float32)
    if max_rounds == 1:
        return one_round((jnp.int32(0), y))[1]
    # All devices of the mesh run the same number of rounds, even those that exchange nothing with
    # each other. Otherwise a collective could wait for a device that has left the loop.
    all_axes = jax.sharding.get_abstract_mesh().manual_axes
    longest = lax.pmax(jnp.max(table.counts), all_axes)
    # shard_map's replication check requires the initial sum to vary over the same mesh axes as the
    # loop's result.
    y += 0 * (table.position[:, :1] + lax.axis_index(axes))
    return lax.while_loop(lambda state: state[0] < longest, one_round, (jnp.int32(0), y))[1]


def exchange_ragged(
    rows: UInt[Array, "M1 W"],
    table: DispatchTable,
    packer: TokenPacker,
    mix: LocalMixture,
    axes: tuple[str, ...],
) -> Float32[Array, "M D"]:
    """Exchanges messages of exact length by two ragged all-to-alls, after an all-gather of lengths.

    Args:
      rows: packed tokens and one without experts, as for :func:`exchange_padded`.
    """
    (M, K), devices = table.position.shape, len(table.counts)
    counts = lax.all_gather(table.counts, axes)
    dispatch, combine = ragged_slices(counts, lax.axis_index(axes))
    slots = table.offsets()[table.destination] + table.position
    sent = rows[table.tokens_by_slot(slots, M * min(devices, K))]
    # The buffer has room for every token of every device. Unused rows are tokens without experts.
    buffer = jnp.broadcast_to(rows[-1], (devices * M, rows.shape[1]))
    received = lax.ragged_all_to_all(sent, buffer, *dispatch, axis_name=axes)
    partial_sums = mix(*packer.unpack(received))
    buffer = jnp.zeros((len(sent), partial_sums.shape[1]), partial_sums.dtype)
    returned = lax.ragged_all_to_all(partial_sums, buffer, *combine, axis_name=axes)
    return gather_sum(returned, slots, table.is_first)


def exchange_one_sided(
    rows: UInt[Array, "M1 W"],
    table: DispatchTable,
    packer: TokenPacker,
    mix: LocalMixture,
    axes: tuple[str, ...],
) -> Float32[Array, "M D"]:
    """Exchanges messages of exact length by stores into the other devices' memory.

    Args:
      rows: packed tokens and one without experts, as for :func:`exchange_padded`.
    """
    M, devices = len(rows) - 1, len(table.counts)
    slots = table.destination * M + table.position
    sent = rows[table.tokens_by_slot(slots, devices * M)].reshape(devices, M, -1)
    received, counts = token_exchange(sent, table.counts, axes=axes)
    tokens, experts, weights = packer.unpack(received.reshape(devices * M, -1))
    # Rows past the received ones hold arbitrary bits, so they become tokens without experts.
    is_received = (jnp.arange(M) < counts[:, None]).reshape(-1, 1)
    partial_sums = mix(tokens, jnp.where(is_received, experts, -1), weights)
    returned, _ = token_exchange(partial_sums.reshape(devices, M, -1), counts, axes=axes)
    return gather_sum(returned.reshape(devices * M, -1), slots, table.is_first)
