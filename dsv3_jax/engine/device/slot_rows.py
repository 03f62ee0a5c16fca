"""Access to the rows of the slots on a mesh that shards the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from sharding import Layout

_Tree = TypeVar("_Tree")


class SlotRows:
    """Reads and writes rows of a :class:`~dsv3_jax.engine.device.state.SlotState` by slot number.

    Rows are sharded like the batch, so that no token, hidden state or setting of a request leaves
    the devices that run it: with V3 on 144 devices, copies of all rows would take hundreds of
    megabytes of every device, and each step would broadcast its hidden states. Slots are numbered
    from 0 on every shard. An array [B, ...] of requests has B / shards entries of each shard, in
    order.

    Without a layout that shards the batch, these are plain indexing operations.
    """

    def __init__(self, layout: Layout | None):
        self._layout = layout
        self.shards = 1 if layout is None else layout.num_shards("batch")

    def is_slot(self, slots: Int[Array, " B"], num_slots: int) -> Bool[Array, " B"]:
        """Returns False for entries that are unused.

        Args:
          num_slots: number of slots of all shards.
        """
        return slots < num_slots // self.shards

    def only(
        self, mask: Bool[Array, " B"], slots: Int[Array, " B"], num_slots: int
    ) -> Int[Array, " B"]:
        """Returns the slots where ``mask`` is set. The other entries become unused."""
        return jnp.where(mask, slots, num_slots // self.shards)

    def get(self, rows: _Tree, slots: Int[Array, " B *_"], *columns: Int[Array, " B *_"]) -> _Tree:
        """Returns ``rows[slots, *columns]`` of each array of a tree. Indices of unused entries are
        clipped."""

        def local(rows: _Tree, *indices: jax.Array) -> _Tree:
            return jax.tree.map(lambda array: array.at[indices].get(mode="clip"), rows)

        return self._on_each_shard(local)(rows, slots, *columns)

    def set(
        self,
        rows: Shaped[Array, " R *_"],
        values: Shaped[Array, " B *_"] | int,
        slots: Int[Array, " B *_"],
        *columns: Int[Array, " B *_"],
    ) -> Shaped[Array, " R *_"]:
        """Returns rows in which ``rows[slots, *columns]`` are ``values``. Indices of unused entries
        and columns out of bounds are dropped."""
        if isinstance(values, int):
            constant = values

            def fill(rows: jax.Array, *indices: jax.Array) -> jax.Array:
                return rows.at[indices].set(constant, mode="drop")

            return self._on_each_shard(fill)(rows, slots, *columns)

        def local(rows: jax.Array, values: jax.Array, *indices: jax.Array) -> jax.Array:
            return rows.at[indices].set(values, mode="drop")

        return self._on_each_shard(local)(rows, values, slots, *columns)

    def concatenate(self, *arrays: Shaped[Array, " _ *rest"]) -> Shaped[Array, " _ *rest"]:
        """Concatenates arrays of requests, shard by shard."""
        if self.shards == 1:
            return jnp.concatenate(arrays)
        return self._joined(jnp.concatenate([self._by_shard(x) for x in arrays], axis=1))

    def pad(self, array: Shaped[Array, " B *rest"], count: int) -> Shaped[Array, " _ *rest"]:
        """Appends ``count`` zeros in all, equally many to each shard's entries."""
        if self.shards == 1:
            return jnp.pad(array, ((0, count), *[(0, 0)] * (array.ndim - 1)))
        widths = ((0, 0), (0, count // self.shards), *[(0, 0)] * (array.ndim - 1))
        return self._joined(jnp.pad(self._by_shard(array), widths))

    def _by_shard(self, array: jax.Array) -> jax.Array:
        return array.reshape(self.shards, len(array) // self.shards, *array.shape[1:])

    def _joined(self, array: jax.Array) -> jax.Array:
        return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])

    def _on_each_shard(self, body: Callable[..., Any]) -> Callable[..., Any]:
        layout = self._layout
        if layout is None or self.shards == 1:
            return body
        batch = layout.partition_spec(("batch",))
        return lambda *args: layout.shard_map(body, (batch,) * len(args), batch)(*args)
