"""Index tables of the token exchange: which tokens are sent to which device, and in which order."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class DispatchTable(NamedTuple):
    """The messages that one device sends: one per destination, with its tokens in their order.

    A token is in a message at most once, however many of its K experts the destination holds.
    Entries of ``destination`` and ``position`` are undefined for (token, expert) pairs whose
    expert is on no destination.
    """

    counts: Int32[Array, " devices"]
    """Number of tokens in the message to each destination."""
    destination: Int32[Array, "M K"]
    """Device that holds the expert of each (token, expert) pair."""
    position: Int32[Array, "M K"]
    """Position of the pair's token in the message to its destination."""
    is_first: Bool[Array, "M K"]
    """Whether the pair has a destination and is its token's first pair with that destination."""

    @classmethod
    def from_owners(cls, owner: Int32[Array, "M K"], num_devices: int) -> DispatchTable:
        """Builds the table from the device that holds each pair's expert.

        Args:
          owner: device of the pair's expert; ``num_devices`` or more if it is on no destination.
        """
        has_token = jnp.any(owner[:, :, None] == jnp.arange(num_devices), axis=1)
        cumulative = jnp.cumsum(has_token, axis=0, dtype=jnp.int32)
        destination = jnp.minimum(owner, num_devices - 1)
        position = jnp.take_along_axis(cumulative, destination, axis=1) - 1
        K = owner.shape[1]
        same = owner[:, :, None] == owner[:, None, :]
        repeated = jnp.any(same & jnp.tri(K, k=-1, dtype=bool), axis=2)
        return cls(cumulative[-1], destination, position, (owner < num_devices) & ~repeated)

    def offsets(self) -> Int32[Array, " devices"]:
        """Returns the start of each message when they are concatenated."""
        return jnp.cumsum(self.counts) - self.counts

    def tokens_by_slot(self, slots: Int32[Array, "M K"], num_slots: int) -> Int32[Array, " slots"]:
        """Inverts an assignment of pairs to slots of a send buffer.

        Args:
          slots: slot of each pair. Only entries with ``is_first`` are read.
          num_slots: size of the send buffer.

        Returns:
          The token in each slot; M in slots without a token.
        """
        M = len(slots)
        token = jnp.broadcast_to(jnp.arange(M)[:, None], slots.shape)
        empty = jnp.full((num_slots,), M, jnp.int32)
        return empty.at[jnp.where(self.is_first, slots, num_slots)].set(token, mode="drop")


class RaggedSlices(NamedTuple):
    """The four index arguments of :func:`jax.lax.ragged_all_to_all`, one number per device each."""

    input_offsets: Int32[Array, " devices"]
    """Start of the slice for each receiver in this device's operand."""
    send_sizes: Int32[Array, " devices"]
    """Number of rows sent to each receiver."""
    output_offsets: Int32[Array, " devices"]
    """Start of this device's slice in the output of each receiver."""
    recv_sizes: Int32[Array, " devices"]
    """Number of rows received from each sender."""


def ragged_slices(
    counts: Int32[Array, "devices devices"], device: int | Int32[Array, ""]
) -> tuple[RaggedSlices, RaggedSlices]:
    """Returns the slices with which ``device`` sends its rows, and with which results come back.

    Args:
      counts: number of rows from each device (first axis) to each device (second axis). Sent rows
        are ordered by receiver and received rows by sender, both without gaps.
    """
    send_offsets = jnp.cumsum(counts, axis=1, dtype=jnp.int32) - counts
    receive_offsets = jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts
    dispatch = RaggedSlices(
        send_offsets[device], counts[device], receive_offsets[device], counts[:, device]
    )
    combine = RaggedSlices(
        receive_offsets[:, device], counts[:, device], send_offsets[:, device], counts[device]
    )
    return dispatch, combine
