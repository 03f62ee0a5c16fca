"""Copies pages between the engine's pool and records, and whole requests to the host and back.

A page is in one array for each array of each layer, and the pool may be wider than what is cached
and divided over devices. On the device, a page is packed into one vector of its logical contents in
the order of a record's payload, so that the host copies one contiguous piece of memory. Bits are
copied as integers of the same size: no NaN and no sign of a zero changes.

Each device packs the pages that it has, and the host reads a page from the device that has it:
nothing is exchanged between devices.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dsv3_jax.engine.device.state import SlotState
from dsv3_jax.kv_cache import PagePool
from dsv3_jax.layers.paged_cache import PAGE_AXES
from dsv3_jax.pages import PageFormat
from sharding import Layout

PAGES_PER_COPY = 8
"""Pages that one call of a compiled program copies."""

_PINNED = "pinned_host"

PackedPage = tuple[jax.Array, ...]
"""The contents of one page: vectors of unsigned integers, one for each item size of the format, on
one device or in its pinned host memory."""


def payload_of(page: PackedPage) -> np.ndarray:
    """Returns the payload of a page's record, of pinned memory without a copy. Waits for it."""
    parts = [np.asarray(part).reshape(-1).view(np.uint8) for part in page]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class PagePacker:
    """Compiled copies of any pages of a pool, for all its layers and arrays.

    It compiles both directions when it is made, for the shapes and shardings of ``pool``. With
    ``pinned``, pages go to pinned host memory, which a device reads and writes itself.

    Raises:
      ValueError: pages cannot go there.
    """

    def __init__(
        self, pool: PagePool, format: PageFormat, layout: Layout | None, *, pinned: bool = False
    ):
        self.pinned = pinned
        if pinned:
            _check_pinned(pool, format)
        self._structure = jax.tree.structure(pool)
        self._sizes = [
            (size, list(arrays))
            for size, arrays in itertools.groupby(format.arrays, lambda array: array.itemsize)
        ]
        self._page_size = format.page_size
        arrays = arrays_by_name(pool)
        self._num_pages = len(next(iter(arrays.values())))
        self._shards = 1 if layout is None else layout.num_shards(PAGE_AXES[0])
        self._layout = layout if self._shards > 1 else None
        everywhere = None if layout is None else layout.sharding(())
        self._everywhere = everywhere
        (first, *_) = jax.tree.leaves(pool)
        self._home = everywhere or jax.sharding.SingleDeviceSharding(*first.devices())
        numbers = jax.ShapeDtypeStruct((PAGES_PER_COPY,), np.int32, sharding=everywhere)
        page = tuple(
            jax.ShapeDtypeStruct(
                (sum(array.numbers(format.page_size) for array in of_size),),
                f"u{size}",
                sharding=everywhere,
            )
            for size, of_size in self._sizes
        )
        gather, scatter = self._gather_local, self._scatter_local
        if self._layout is not None:
            rows, copies = self._layout.partition_spec(PAGE_AXES), jax.sharding.PartitionSpec()
            gather = self._layout.shard_map(gather, (rows, copies), rows)
            scatter = self._layout.shard_map(scatter, (rows, copies, copies), rows)
        self._gather = jax.jit(gather).lower(arrays, numbers).compile()
        self._scatter = (
            jax.jit(
                scatter,
                donate_argnums=0,
                out_shardings={name: array.sharding for name, array in arrays.items()},
            )
            .lower(arrays, numbers, [page] * PAGES_PER_COPY)
            .compile()
        )

    def gather(self, pool: PagePool, pages: Sequence[int]) -> list[PackedPage]:
        """Returns copies of pages, still on the device, and starts their transfer to the host."""
        arrays = arrays_by_name(pool)
        packed = []
        for batch, numbers in self._batches(pages):
            # Each program returns PAGES_PER_COPY pages; the last of them may be padding.
            for page, parts in zip(batch, self._gather(arrays, numbers), strict=False):
                packed.append(tuple(self._on_owner(page, part) for part in parts))
        if self.pinned:
            return [tuple(map(_to_pinned, page)) for page in packed]
        for part in itertools.chain.from_iterable(packed):
            part.copy_to_host_async()
        return packed

    def stage(self, payload: np.ndarray, pinned: PackedPage | None = None) -> PackedPage:
        """Copies the payload of a record, or its copy in pinned host memory, to the device."""
        if pinned is not None:
            return tuple(jax.device_put([part.reshape(-1) for part in pinned], self._home))
        parts, begin = [], 0
        for size, arrays in self._sizes:
            end = begin + sum(array.numbers(self._page_size) for array in arrays) * size
            parts.append(payload[begin:end].view(f"u{size}"))
            begin = end
        return tuple(jax.device_put(parts, self._everywhere))

    def scatter(
        self, pool: PagePool, pages: Sequence[int], contents: Sequence[PackedPage]
    ) -> PagePool:
        """Returns the pool, which is donated, with what :meth:`stage` returned in some pages."""
        arrays = arrays_by_name(pool)
        names = list(arrays)
        for number, (batch, numbers) in enumerate(self._batches(pages)):
            first = number * PAGES_PER_COPY
            padded = [*contents[first : first + len(batch)]]
            padded += [padded[0]] * (PAGES_PER_COPY - len(padded))
            arrays = self._scatter(arrays, numbers, padded)
        return jax.tree.unflatten(self._structure, [arrays[name] for name in names])

    def _batches(self, pages: Sequence[int]) -> Iterator[tuple[Sequence[int], jax.Array]]:
        """Yields pages, at most ``PAGES_PER_COPY``, and their padded numbers on the device."""
        for begin in range(0, len(pages), PAGES_PER_COPY):
            batch = pages[begin : begin + PAGES_PER_COPY]
            numbers = np.full(PAGES_PER_COPY, self._num_pages, np.int32)
            numbers[: len(batch)] = batch
            yield batch, jax.device_put(numbers, self._everywhere)

    def _on_owner(self, page: int, part: jax.Array) -> jax.Array:
        """Returns a page's part on a device that has the page."""
        owner = page // (self._num_pages // self._shards)
        return next(
            shard.data for shard in part.addressable_shards if (shard.index[0].start or 0) == owner
        )

    def _local(self, pages: jax.Array, pages_here: int) -> jax.Array:
        """Returns page numbers among those of this device, or out of bounds."""
        if self._layout is None:
            return pages
        local = pages - self._layout.shard_index(PAGE_AXES[0]) * pages_here
        # A negative number would count from the end.
        return jnp.where(local < 0, pages_here, local)

    def _gather_local(self, arrays: dict[str, jax.Array], pages: jax.Array) -> list[PackedPage]:
        """Packs pages. Those of other devices, and numbers out of bounds, give any contents."""
        packed: list[jax.Array] = []
        for size, of_size in self._sizes:
            columns = []
            for array in of_size:
                bits = jax.lax.bitcast_convert_type(arrays[array.name], f"u{size}")
                rows = bits.at[self._local(pages, len(bits))].get(mode="clip")
                rows = rows[:, : array.rows or self._page_size, : array.width]
                columns.append(rows.reshape(len(pages), -1))
            packed.append(jnp.concatenate(columns, axis=1))
        return [tuple(part[i : i + 1] for part in packed) for i in range(len(pages))]

    def _scatter_local(
        self, arrays: dict[str, jax.Array], pages: jax.Array, contents: list[PackedPage]
    ) -> dict[str, jax.Array]:
        """Unpacks pages into the arrays. Those of other devices are dropped."""
        written = dict(arrays)
        for (size, of_size), *parts in zip(self._sizes, *contents, strict=True):
            packed, begin = jnp.stack(parts), 0
            for array in of_size:
                end = begin + array.numbers(self._page_size)
                rows = packed[:, begin:end].reshape(len(pages), -1, array.width)
                old = arrays[array.name]
                # A CPU would scatter bfloat16 as float32.
                bits = jax.lax.bitcast_convert_type(old, f"u{size}")
                lacking = old.shape[1] - rows.shape[1], old.shape[2] - array.width
                rows = jnp.pad(rows, ((0, 0), *((0, n) for n in lacking)))
                bits = bits.at[self._local(pages, len(old))].set(rows, mode="drop")
                written[array.name] = jax.lax.bitcast_convert_type(bits, old.dtype)
                begin = end
        return written


@dataclasses.dataclass
class SwappedRequest:
    """A preempted request in host memory, or on its way there. Empty until it is launched."""

    slot: list[Any] = dataclasses.field(default_factory=list)
    """Its row of each array of :attr:`SlotState.slots`."""
    pages: list[PackedPage] = dataclasses.field(default_factory=list)

    def free_device(self) -> None:
        """Keeps the copy in host memory alone. Waits for it."""
        self.slot, self.pages = jax.device_get((self.slot, self.pages))


class RequestCopier:
    """Copies requests to host memory, and back to other slots and pages.

    A copy is read in the order of the device's work: steps that were dispatched before it are in
    it, and later ones, which may write to the same pages, are not. It is compiled for the shapes
    and shardings of ``state``, on one device.
    """

    def __init__(self, state: SlotState, packer: PagePacker):
        self._packer = packer
        rows, self._structure = jax.tree.flatten(state.slots)
        slot = jax.ShapeDtypeStruct((), np.int32)
        self._read = jax.jit(_read_row).lower(rows, slot).compile()
        shardings = [array.sharding for array in rows]
        write = jax.jit(_write_row, donate_argnums=0, out_shardings=shardings)
        self._write = write.lower(rows, slot, jax.eval_shape(_read_row, rows, slot)).compile()

    def swap_out(
        self, state: SlotState, slot: int, pages: Sequence[int], swapped: SwappedRequest
    ) -> None:
        """Copies a request to ``swapped``, still on the device, and starts its transfer."""
        swapped.slot = self._read(jax.tree.leaves(state.slots), jax.device_put(np.int32(slot)))
        for array in swapped.slot:
            array.copy_to_host_async()
        swapped.pages = self._packer.gather(state.pool, pages)

    def swap_in(
        self, state: SlotState, slot: int, pages: Sequence[int | None], swapped: SwappedRequest
    ) -> SlotState:
        """Returns the state, which is donated, with a swapped request. ``pages`` may be None."""
        rows = self._write(
            jax.tree.leaves(state.slots),
            jax.device_put(np.int32(slot)),
            jax.device_put(swapped.slot),
        )
        pairs = zip(pages, swapped.pages, strict=True)
        contents = {
            page: self._packer.stage(payload_of(of)) for page, of in pairs if page is not None
        }
        pool = self._packer.scatter(state.pool, [*contents], [*contents.values()])
        slots = jax.tree.unflatten(self._structure, rows)
        return dataclasses.replace(state, pool=pool, **slots)


def _check_pinned(pool: PagePool, format: PageFormat) -> None:
    """Raises ValueError if devices have no pinned host memory, or a page has several parts, which a
    record would have to copy."""
    for device in jax.tree.leaves(pool)[0].devices():
        kinds = [memory.kind for memory in device.addressable_memories()]
        if _PINNED not in kinds:
            raise ValueError(
                f"pinned: expected devices with the memory {_PINNED}, got {device.device_kind} with"
                f" {', '.join(kinds)}"
            )
    if len(sizes := {array.itemsize for array in format.arrays}) > 1:
        raise ValueError(
            "pinned: expected a cache whose values all have the same size, got sizes of"
            f" {', '.join(map(str, sorted(sizes)))} bytes; cache_dtype has values and scales"
        )


def _to_pinned(part: jax.Array) -> jax.Array:
    """Starts to copy an array to the pinned host memory of its device."""
    (device,) = part.devices()
    return jax.device_put(part, jax.sharding.SingleDeviceSharding(device, memory_kind=_PINNED))


def arrays_by_name(pool: PagePool) -> dict[str, jax.Array]:
    """Returns the arrays of a pool, in flattening order, by their names in a PageFormat."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(pool)
    return {
        f"{group.name}.{layer.idx}.{name.key}": array  # pyright: ignore[reportAttributeAccessIssue]
        for (group, layer, name), array in leaves
    }


def _read_row(rows: list[jax.Array], slot: Int[Array, ""]) -> list[jax.Array]:
    return [array[slot] for array in rows]


def _write_row(
    rows: list[jax.Array], slot: Int[Array, ""], values: list[jax.Array]
) -> list[jax.Array]:
    return [array.at[slot].set(v) for array, v in zip(rows, values, strict=True)]
