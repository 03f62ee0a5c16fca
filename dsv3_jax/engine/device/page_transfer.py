"""Moves pages between the device and the tiers, in threads of its own.

Copies of pages are launched in the order of the device's work, by the thread that launches steps;
everything else happens elsewhere. To save pages, that thread gathers them into new arrays. Another
thread waits for these on the host and stores them. To load pages, records come from the tiers and
are copied to the device while their request waits. The launching thread only scatters them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np

from dsv3_jax.engine.device.page_packing import PackedPage, PagePacker, payload_of
from dsv3_jax.engine.device.page_pool import PoolLayout
from dsv3_jax.engine.scheduling.step_plan import PageLoad, PageSave
from dsv3_jax.kv_cache import PagePool
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.pages import (
    CacheIdentity,
    CacheTiers,
    PageAddress,
    PageError,
    PageFormat,
    PageRecord,
    PageTiers,
    TierStats,
)
from dsv3_jax.pages.weights import model_digest

logger = logging.getLogger(__name__)

_MOST_UNSAVED_BYTES = 2**28
"""Bytes of gathered pages, on the device, that wait for the host. More pages are not saved."""


StagedPage = PackedPage | np.ndarray
"""A page to write to the pool: its copy on the device, or its payload if there was no room."""

_Gathered = tuple[CacheIdentity, list[PageAddress], list[PackedPage]]
"""Pages on their way to the tiers."""


class StagedLoad:
    """Pages on their way from the tiers, as ``Load`` in ``scheduling/stored_pages.py``."""

    def __init__(self, transfer: PageTransfer):
        self._transfer = transfer
        self.contents: list[StagedPage] | None = None
        self.is_closed = False
        self.staged_bytes = 0
        self.future: Future[list[PageRecord]] | None = None

    def close(self) -> None:
        """Gives up the load, or its share of the memory for staging."""
        self.is_closed = True
        # Those that still refer to the load keep no pages by that.
        future, self.future = self.future, None
        if future is not None:
            future.cancel()
        self._transfer.release(self)


class PageTransfer:
    """The store of pages that a scheduler loads from and saves to, and the copies for it."""

    def __init__(
        self,
        identity: CacheIdentity,
        tiers: PageTiers,
        packer: PagePacker,
        pool: PoolLayout,
        config: CacheTiers,
    ):
        self.identity = identity
        """Pages of another identity are not loaded."""
        self.parts = pool.token_parts
        self.on_load: Callable[[], None] = lambda: None
        """Called in another thread whenever pages have come."""
        self._tiers = tiers
        self._packer = packer
        self._pool = pool
        self._staging_bytes = config.staging_bytes
        self._lock = threading.Lock()
        self._is_closed = False
        self._stager = ThreadPoolExecutor(1, "dsv3-page-stager")
        self._unsaved_bytes = 0
        self.dropped_pages = 0
        """Pages that were not saved, because too many waited for the host."""
        self._queue: queue.SimpleQueue[_Gathered | threading.Event | None] = queue.SimpleQueue()
        self._saver = threading.Thread(target=self._save_all, name="dsv3-page-saver", daemon=True)
        self._saver.start()

    @classmethod
    def of(
        cls, model: DeepSeekV3, arrays: PagePool, pool: PoolLayout, config: CacheTiers, *, mtp: bool
    ) -> PageTransfer:
        """Returns the transfer for the pages of a model. It reads all weights once, and compiles
        for a pool of the shapes and shardings of ``arrays``.

        Raises:
          OSError: the directory of the disk tier cannot be used.
          ValueError: pages cannot be in pinned host memory, or not one can be loaded.
        """
        format = PageFormat.of(model.cache_spec(mtp=mtp), pool.page_size)
        page_bytes = format.num_bytes * pool.token_parts
        if config.most_load_bytes < page_bytes:
            raise ValueError(
                f"load_bytes: expected at least the {page_bytes} bytes of a page, got"
                f" {config.most_load_bytes}"
            )
        identity = CacheIdentity(model_digest(model), format, int(mtp))
        packer = PagePacker(arrays, format, model.layout, pinned=config.pinned)
        return cls(identity, PageTiers(config), packer, pool, config)

    def identity_of(self, model: DeepSeekV3) -> CacheIdentity:
        """Returns the identity of the pages of another model of the same signature."""
        return dataclasses.replace(self.identity, model=model_digest(model), salt="")

    def forget(self) -> None:
        """Makes all pages that were stored so far unreachable for this engine."""
        self.identity = dataclasses.replace(self.identity, salt=secrets.token_hex(8))
        self._tiers.clear_memory()

    # The scheduler calls these, see :class:`~dsv3_jax.engine.scheduling.stored_pages.PageStore`.

    def addresses(
        self, tokens: Sequence[int], known: Sequence[PageAddress] = ()
    ) -> list[PageAddress]:
        is_current = bool(known) and known[0].parent == self.identity.digest
        return self.identity.addresses(tokens, known if is_current else ())

    @property
    def page_bytes(self) -> int:
        return self.identity.format.num_bytes

    def lookup(self, addresses: Sequence[PageAddress]) -> int:
        return self._tiers.lookup(addresses)

    def load(self, addresses: Sequence[PageAddress]) -> StagedLoad:
        load, identity = StagedLoad(self), self.identity
        load.future = self._tiers.fetch(addresses)

        def stage(_: object) -> None:
            if load.is_closed:
                return
            with contextlib.suppress(RuntimeError):  # the engine has ended
                self._stager.submit(self._stage, load, identity, addresses)

        load.future.add_done_callback(stage)
        return load

    def fetch(self, addresses: Sequence[PageAddress]) -> Future[list[PageRecord]]:
        """Returns the records of leading pages of the tiers, for a
        :class:`~dsv3_jax.pages.PageSource`."""
        return self._tiers.fetch(addresses)

    # The thread that launches steps calls these.

    def save(self, pool: PagePool, saves: Sequence[PageSave]) -> None:
        """Launches copies of pages, and leaves the rest to another thread."""
        if not self._tiers.takes_pages:
            return
        for identity, of_identity in itertools.groupby(saves, lambda save: save.identity):
            pages = [
                (number, address)
                for save in of_identity
                for number, address in zip(
                    self._pool.table([save.page]).tolist(), save.addresses, strict=True
                )
                if address not in self._tiers
            ]
            count = self._reserve_unsaved(len(pages), identity.format.num_bytes)
            if not count:
                continue
            numbers, addresses = map(list, zip(*pages[:count], strict=True))
            try:
                gathered = self._packer.gather(pool, numbers)
            except Exception as error:  # such as a lack of memory for the copies
                self._drop(identity, count, error)
            else:
                self._queue.put((identity, addresses, gathered))

    def _drop(self, identity: CacheIdentity, pages: int, error: BaseException) -> None:
        logger.warning("cache tiers: %d pages were not saved: %r", pages, error)
        with self._lock:
            self._unsaved_bytes -= pages * identity.format.num_bytes
            self.dropped_pages += pages

    def write(self, pool: PagePool, loads: Sequence[PageLoad]) -> PagePool:
        """Returns the pool, which is donated, with pages that were loaded."""
        pages = self._pool.table([load.page for load in loads]).tolist()
        staged: list[StagedPage] = [page for load in loads for page in load.contents]
        parts = [self._packer.stage(p) if isinstance(p, np.ndarray) else p for p in staged]
        return self._packer.scatter(pool, pages, parts)

    # Others call these.

    def release(self, load: StagedLoad) -> None:
        """Frees a load's share of the memory for staging."""
        with self._lock:
            self._staging_bytes += load.staged_bytes
            load.staged_bytes = 0

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until all launched pages are stored. Returns False after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        reached = threading.Event()
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._queue.put(reached)
        if is_closed:  # the thread stores what was launched, and ends
            self._saver.join(timeout)
            are_stored = not self._saver.is_alive()
        else:
            are_stored = reached.wait(timeout)
        if not are_stored:
            return False
        return self._tiers.flush(None if end is None else max(end - time.monotonic(), 0.0))

    def close(self, timeout: float | None = None) -> None:
        """Stores the pages that were launched, within ``timeout`` seconds, and ends the threads."""
        self._stager.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            self._queue.put(None)
        self._saver.join(timeout)
        self._tiers.close(timeout)

    def stats(self) -> tuple[TierStats, ...]:
        """Returns the figures of each tier."""
        return self._tiers.stats()

    # Other threads.

    def _stage(
        self, load: StagedLoad, identity: CacheIdentity, addresses: Sequence[PageAddress]
    ) -> None:
        """Copies records to the device, as far as the memory for staging goes."""
        contents: list[StagedPage] = []
        try:
            future = load.future
            records = [] if future is None or future.cancelled() else future.result()
            for record, address in zip(records, addresses, strict=False):
                if load.is_closed:
                    break
                record.check(identity, address)
                page: StagedPage = record.payload
                with self._lock:
                    if has_room := record.num_bytes <= self._staging_bytes:
                        self._staging_bytes -= record.num_bytes
                        load.staged_bytes += record.num_bytes
                if has_room:
                    page = self._packer.stage(record.payload, record.pinned)
                contents.append(page)
            jax.block_until_ready(contents)
        except PageError as error:
            logger.warning("cache tiers: a page is not used: %s", error)
        except BaseException:  # its requests wait for the load to end, whatever it is
            logger.exception("cache tiers: pages were not loaded")
            contents = []
        load.contents = contents
        if load.is_closed:  # meanwhile
            load.contents = []
            self.release(load)
        self.on_load()

    def _reserve_unsaved(self, pages: int, page_bytes: int) -> int:
        """Returns how many of some pages can wait for the host."""
        with self._lock:
            count = min(pages, max(_MOST_UNSAVED_BYTES - self._unsaved_bytes, 0) // page_bytes)
            self._unsaved_bytes += count * page_bytes
            self.dropped_pages += pages - count
            return count

    def _save_all(self) -> None:
        """The body of the thread that stores pages."""
        while (gathered := self._queue.get()) is not None:
            if isinstance(gathered, threading.Event):
                gathered.set()
                continue
            identity, addresses, pages = gathered
            try:
                self._tiers.store(
                    [
                        PageRecord(
                            identity.digest,
                            address,
                            identity.format,
                            payload_of(page),
                            page if self._packer.pinned else None,
                        )
                        for address, page in zip(addresses, pages, strict=True)
                    ]
                )
            except BaseException as error:  # the thread has to go on
                # The device's, and then its steps fail too, or of a lack of memory.
                self._drop(identity, len(pages), error)
            else:
                with self._lock:
                    self._unsaved_bytes -= len(pages) * identity.format.num_bytes
