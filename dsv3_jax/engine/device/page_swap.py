"""Copies of cache pages and request slots between the device and host memory.

Pages are copied a fixed number at a time, so that each direction is one compiled program. A copy to
the host is read in the order of the device's work: steps that were dispatched before it are in it,
and later ones, which may write to the same pages, are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int, Shaped

from dsv3_jax.engine.device.state import SlotState
from dsv3_jax.kv_cache import PagePool

PAGES_PER_COPY = 8


PageContents = dict[str, Shaped[Array, "n page width"]]
"""Contents of n pages: one array for each array of a pool, by its name."""


def page_arrays(pool: PagePool) -> dict[str, Shaped[Array, "P page width"]]:
    """Returns the arrays of a pool by name, for example ``.layers[0]['latent']``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(pool)
    return {jax.tree_util.keystr(path): array for path, array in leaves}


def gather_pages(
    arrays: dict[str, Shaped[Array, "P page width"]], pages: Int[Array, " n"]
) -> PageContents:
    """Returns the contents of n pages in each array. Numbers from P on give any contents."""
    return {name: array.at[pages].get(mode="clip") for name, array in arrays.items()}


def scatter_pages(
    arrays: dict[str, Shaped[Array, "P page width"]],
    pages: Int[Array, " n"],
    contents: PageContents,
) -> dict[str, Shaped[Array, "P page width"]]:
    """Returns the arrays with new contents in n pages. Numbers from P on are ignored."""
    return {
        name: array.at[pages].set(contents[name], mode="drop") for name, array in arrays.items()
    }


class PageCopier:
    """Compiled copies of any pages of a pool, for all its layers and arrays.

    It compiles both directions when it is made.

    Args:
      pool: a pool of the shapes and shardings to compile for.
      pages_per_copy: pages that one call of a compiled program copies.
    """

    def __init__(self, pool: PagePool, pages_per_copy: int = PAGES_PER_COPY):
        self.pages_per_copy = pages_per_copy
        arrays = page_arrays(pool)
        self._names = list(arrays)  # jax.jit sorts the names of a dict
        self._structure = jax.tree.structure(pool)
        self._num_pages = len(next(iter(arrays.values())))
        numbers = jax.ShapeDtypeStruct((pages_per_copy,), np.int32)
        self._gather = jax.jit(gather_pages).lower(arrays, numbers).compile()
        shardings = {name: array.sharding for name, array in arrays.items()}
        scatter = jax.jit(scatter_pages, donate_argnums=0, out_shardings=shardings)
        contents = jax.eval_shape(gather_pages, arrays, numbers)
        self._scatter = scatter.lower(arrays, numbers, contents).compile()

    def gather(self, pool: PagePool, pages: Sequence[int]) -> list[PageContents]:
        """Returns copies of pages on the device, ``pages_per_copy`` at a time. The last are
        padded."""
        arrays = page_arrays(pool)
        return [self._gather(arrays, numbers) for numbers in self._batches(pages)]

    def scatter(
        self, pool: PagePool, pages: Sequence[int | None], contents: Sequence[PageContents]
    ) -> PagePool:
        """Returns the pool, which is donated, with the results of :meth:`gather` in other pages.

        Args:
          pages: number of the page that each gathered page goes to. None leaves it out.
          contents: on the device or the host.
        """
        arrays = page_arrays(pool)
        for numbers, each in zip(self._batches(pages), contents, strict=True):
            arrays = self._scatter(arrays, numbers, jax.device_put(each))
        return jax.tree.unflatten(self._structure, [arrays[name] for name in self._names])

    def _batches(self, pages: Sequence[int | None]) -> Iterator[jax.Array]:
        """Yields page numbers on the device, ``pages_per_copy`` at a time."""
        n = self.pages_per_copy
        for begin in range(0, len(pages), n):
            numbers = np.full(n, self._num_pages, np.int32)
            for i, page in enumerate(pages[begin : begin + n]):
                numbers[i] = self._num_pages if page is None else page
            yield jax.device_put(numbers)


class SavedRequest(NamedTuple):
    """A request's slot and pages, apart from the engine's state."""

    slot: list[Any]
    """Its row of each array of :attr:`SlotState.slots`."""
    pages: list[PageContents]
    """Its pages, see :meth:`PageCopier.gather`."""

    def on_host(self) -> SavedRequest:
        """Returns the same in host memory. Waits for the device."""
        return jax.device_get(self)


@dataclasses.dataclass
class SwappedRequest:
    """A preempted request in host memory, or on its way there."""

    saved: SavedRequest | None = None
    """None until the copy is launched."""

    def free_device(self) -> None:
        """Keeps the copy in host memory alone. Waits for it."""
        if self.saved is not None:
            self.saved = self.saved.on_host()


class RequestCopier:
    """Saves requests, and restores them in other slots and pages.

    It compiles both directions when it is made.

    Args:
      state: a state of the shapes and shardings to compile for.
    """

    def __init__(self, state: SlotState, pages_per_copy: int = PAGES_PER_COPY):
        self._pages = PageCopier(state.pool, pages_per_copy)
        rows, self._structure = jax.tree.flatten(state.slots)
        slot = jax.ShapeDtypeStruct((), np.int32)
        self._read = jax.jit(_read_row).lower(rows, slot).compile()
        shardings = [array.sharding for array in rows]
        write = jax.jit(_write_row, donate_argnums=0, out_shardings=shardings)
        self._write = write.lower(rows, slot, jax.eval_shape(_read_row, rows, slot)).compile()

    def save(self, state: SlotState, slot: int, pages: Sequence[int]) -> SavedRequest:
        """Returns a copy of a request, still on the device, and starts its transfer to the host."""
        row = self._read(jax.tree.leaves(state.slots), jax.device_put(np.int32(slot)))
        saved = SavedRequest(row, self._pages.gather(state.pool, pages))
        for array in jax.tree.leaves(saved):
            array.copy_to_host_async()
        return saved

    def restore(
        self, state: SlotState, slot: int, pages: Sequence[int | None], saved: SavedRequest
    ) -> SlotState:
        """Returns the state, which is donated, with a saved request.

        Args:
          pages: page that each saved page goes to. None leaves it out.
        """
        rows = self._write(
            jax.tree.leaves(state.slots),
            jax.device_put(np.int32(slot)),
            jax.device_put(saved.slot),
        )
        pool = self._pages.scatter(state.pool, pages, saved.pages)
        slots = jax.tree.unflatten(self._structure, rows)
        return dataclasses.replace(state, pool=pool, **slots)


def _read_row(rows: list[jax.Array], slot: Int[Array, ""]) -> list[jax.Array]:
    return [array[slot] for array in rows]


def _write_row(
    rows: list[jax.Array], slot: Int[Array, ""], values: list[jax.Array]
) -> list[jax.Array]:
    return [array.at[slot].set(v) for array, v in zip(rows, values, strict=True)]
