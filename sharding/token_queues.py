"""Which tokens go to which device, in what place."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


class Queues(NamedTuple):
    """One queue a destination, in the order of the tokens; a token stands in each at most once."""

    counts: Int32[Array, " devices"]
    """Tokens in each queue."""
    destination: Int32[Array, "M K"]
    """Where each (token, expert) pair goes; of no meaning for pairs that go nowhere."""
    place: Int32[Array, "M K"]
    """Of the pair's token in the queue of its destination; likewise."""
    leads: Bool[Array, "M K"]
    """Whether the pair goes somewhere and is its token's first to that destination."""

    @classmethod
    def of(cls, owner: Int32[Array, "M K"], devices: int) -> Queues:
        """``owner``: the device of each pair's expert; ``devices`` or more for none."""
        reached = jnp.any(owner[:, :, None] == jnp.arange(devices), axis=1)
        arrivals = jnp.cumsum(reached, axis=0, dtype=jnp.int32)
        destination = jnp.minimum(owner, devices - 1)
        place = jnp.take_along_axis(arrivals, destination, axis=1) - 1
        K = owner.shape[1]
        same = owner[:, :, None] == owner[:, None, :]
        repeated = jnp.any(same & jnp.tri(K, k=-1, dtype=bool), axis=2)
        return cls(arrivals[-1], destination, place, (owner < devices) & ~repeated)

    def starts(self) -> Int32[Array, " devices"]:
        """Where each queue starts when they stand one behind the other."""
        return jnp.cumsum(self.counts) - self.counts

    def tokens_at(self, slots: Int32[Array, "M K"], size: int) -> Int32[Array, " size"]:
        """The token of every slot, if leading pairs stand in ``slots``; M where none does."""
        M = len(slots)
        token = jnp.broadcast_to(jnp.arange(M)[:, None], slots.shape)
        empty = jnp.full((size,), M, jnp.int32)
        return empty.at[jnp.where(self.leads, slots, size)].set(token, mode="drop")


class Slices(NamedTuple):
    """The four arguments of ``jax.lax.ragged_all_to_all``, one number a device each."""

    input_offsets: Int32[Array, " devices"]
    send_sizes: Int32[Array, " devices"]
    output_offsets: Int32[Array, " devices"]
    """Where the slice that goes to a device starts on that device."""
    recv_sizes: Int32[Array, " devices"]


def ragged_slices(
    counts: Int32[Array, "devices devices"], me: int | Int32[Array, ""]
) -> tuple[Slices, Slices]:
    """The slices there and back, for device ``me``.

    Args:
      counts: rows from each device (first axis) to each (second). A device keeps what it sends in
        the order of receivers and what it receives in the order of senders, without gaps.
    """
    sent = jnp.cumsum(counts, axis=1, dtype=jnp.int32) - counts
    received = jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts
    there = Slices(sent[me], counts[me], received[me], counts[:, me])
    back = Slices(received[:, me], counts[:, me], sent[:, me], counts[me])
    return there, back
