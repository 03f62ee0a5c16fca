"""Page records in a directory, which several processes share and which outlives them.

Each record is a file named after its digest, and appears under that name only when it is complete:
it is written under another name and renamed. Files are not synced, because a file that a power cut
damaged is refused by its checksum when it is read. Readers need no lock. Writers hold a lock on the
directory, and count in it how many bytes all files have.

When the files exceed the capacity, the least recently used ones are deleted until nine tenths are
left. The time of a file's last use is its modification time. A use of a page counts as one of all
pages before it, and theirs is later: the end of a prefix is deleted before its beginning, also
after a restart and by other processes. A page without all of those before it is of no use. It is
stored only while a tenth of the capacity is free, and is deleted first.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from dsv3_jax.files import atomic_file, remove_partial_files
from dsv3_jax.pages.address import PageAddress
from dsv3_jax.pages.record import PageError, PageRecord, TierStats

logger = logging.getLogger(__name__)

_FOLDERS = "[0-9a-f]" * 2
_FILES = "[0-9a-f]" * 64 + ".page"
_READERS = min(16, os.cpu_count() or 1)
_PAGES_PER_LOCK = 64
_LEFT_AFTER_EVICTION = 0.9


class DiskPages:
    """Reads and writes records in threads of its own.

    Args:
      directory: is created if it does not exist. It must be on a file system with locks and atomic
        renames. A user who can write to it can feed wrong contents to the requests of others:
        checksums find damage, not intent.
      capacity: most bytes of all files.
      unwritten: most bytes of records that wait to be written. More are dropped.
    """

    name = "disk"

    def __init__(self, directory: str | os.PathLike[str], capacity: int, unwritten: int = 2**30):
        if capacity < 0:
            raise ValueError(f"disk_bytes: expected 0 or more, got {capacity}")
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._capacity = capacity
        self._most_unwritten = unwritten
        self._parents: dict[bytes, bytes] = {}  # of pages that are on the disk, as far as we know
        self._unwritten: dict[bytes, PageRecord] = {}
        self._unwritten_bytes = 0
        self._changed = threading.Condition()
        self._stats = TierStats(self.name)
        self._is_closed = False
        self._last_use = 0  # in nanoseconds; each use is later than all before it
        with self._locked():
            self._remove_unused()
        self._queue: queue.SimpleQueue[PageRecord | None] = queue.SimpleQueue()
        self._readers = ThreadPoolExecutor(_READERS, "dsv3-disk-reader")
        self._writer = threading.Thread(
            target=self._write_all, name="dsv3-disk-writer", daemon=True
        )
        self._writer.start()

    def __contains__(self, address: PageAddress) -> bool:
        """Whether this process has seen the page on the disk, or is about to write it."""
        return address.digest in self._parents or address.digest in self._unwritten

    def lookup(self, addresses: Sequence[PageAddress]) -> int:
        """See :class:`~dsv3_jax.pages.record.PageSource`. It looks at the file system, for pages of
        other processes."""
        for number, address in enumerate(addresses):
            if not self._exists(address.digest):
                for missing in addresses[number:]:  # another process may have deleted them
                    self._parents.pop(missing.digest, None)
                return number
        return len(addresses)

    def fetch(self, addresses: Sequence[PageAddress]) -> Future[list[PageRecord]]:
        """See :class:`~dsv3_jax.pages.record.PageSource`. Several threads read."""
        future: Future[list[PageRecord]] = Future()
        pages: dict[int, PageRecord] = {}
        unread = len(addresses)

        def read(number: int) -> None:
            record = None
            try:
                if not (future.cancelled() or self._is_closed):
                    record = self._read(addresses[number])
            except BaseException:  # the future has to end, whatever it is
                logger.exception("disk cache: a page was not read")
            finally:
                ended(number, record)

        def ended(number: int, record: PageRecord | None) -> None:
            nonlocal unread
            with self._changed:
                if record is not None:
                    pages[number] = record
                unread -= 1
                if unread:
                    return
            if not future.set_running_or_notify_cancel():
                return
            records = [pages[n] for n in itertools.takewhile(pages.__contains__, itertools.count())]
            try:
                if records:
                    self._touch(addresses[len(records) - 1], records[0].identity)
                with self._changed:
                    self._stats = self._stats.plus(hits=records)
            finally:
                future.set_result(records)

        # A cancelled future does not keep the pages that were read for it.
        future.add_done_callback(lambda future: pages.clear() if future.cancelled() else None)
        if not addresses or self._is_closed:
            future.set_result([])
            return future
        for number in range(len(addresses)):
            try:
                self._readers.submit(read, number)
            except RuntimeError:  # it was closed meanwhile, or there can be no more threads
                ended(number, None)
        return future

    def store(self, records: Sequence[PageRecord]) -> None:
        """See :class:`~dsv3_jax.pages.record.PageSink`."""
        with self._changed:
            for record in records:
                if self._is_closed or record.address in self:
                    continue
                if self._unwritten_bytes + record.num_bytes > self._most_unwritten:
                    self._stats = self._stats.plus(dropped=1)
                    continue
                self._unwritten[record.address.digest] = record
                self._unwritten_bytes += record.num_bytes
                self._queue.put(record)

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until everything that was stored is written. Returns False after ``timeout``
        seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unwritten, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Writes what is stored, within ``timeout`` seconds, and ends the threads."""
        with self._changed:
            self._is_closed = True
        self._queue.put(None)
        self._writer.join(timeout)
        self._readers.shutdown(wait=False)  # they read nothing more, and end their futures

    def stats(self) -> TierStats:
        """Returns its figures. ``used_bytes`` counts the files of all processes, as of this
        process's last write."""
        return self._stats

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._directory / name[:2] / f"{name}.page"

    def _exists(self, digest: bytes) -> bool:
        # Unlike Path.exists, it raises no error of the disk.
        return os.path.exists(self._path(digest))

    # Reading.

    def _read(self, address: PageAddress) -> PageRecord | None:
        """Returns a page, or None if it is missing or cannot be read. Deletes it if its record is
        wrong in any way."""
        path = self._path(address.digest)
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise PageError("page record: is not a file")
            with path.open("rb") as file:
                record = PageRecord.read(file, status.st_size)
            if record.address != address:
                raise PageError("page record: is under the name of another page")
        except FileNotFoundError:
            self._parents.pop(address.digest, None)
            return None
        except OSError as error:
            logger.warning("disk cache: %s cannot be read: %s", path, error.strerror)
            return None
        except Exception as error:
            self._refuse(path, error)
            return None
        self._parents[address.digest] = address.parent
        return record

    def _refuse(self, path: Path, error: Exception) -> None:
        """Deletes a damaged file. If another process has just replaced it, that one is lost too."""
        logger.warning("disk cache: %s was deleted: %s", path, str(error) or repr(error))
        with contextlib.suppress(OSError):
            path.unlink()
        with self._changed:
            self._parents.pop(bytes.fromhex(path.stem), None)
            self._stats = self._stats.plus(damaged=1)

    # Writing.

    def _write_all(self) -> None:
        """The body of the thread that writes."""
        is_open = True
        while is_open:
            batch = [self._queue.get()]
            while len(batch) < _PAGES_PER_LOCK and not self._queue.empty():
                batch.append(self._queue.get())
            is_open = None not in batch
            records = [record for record in batch if record is not None]
            count, written = self._write(records)
            with self._changed:
                for record in records:
                    del self._unwritten[record.address.digest]
                    self._unwritten_bytes -= record.num_bytes
                self._stats = self._stats.plus(stored=written, dropped=len(records) - count)
                self._changed.notify_all()

    def _write(self, records: Sequence[PageRecord]) -> tuple[int, list[PageRecord]]:
        """Writes records. Returns how many are on the disk now, and those that are new there."""
        count, written = 0, []
        if not records:
            return count, written
        try:
            with self._locked():
                for number, record in enumerate(records):
                    path = self._path(record.address.digest)
                    if not path.exists():
                        if not self._write_file(path, record, records[:number]):
                            continue
                        written.append(record)
                    self._parents[record.address.digest] = record.address.parent
                    count += 1
                self._touch_all(records)
        except Exception as error:  # the thread has to go on
            lost, reason = len(records) - count, str(error) or repr(error)
            logger.warning("disk cache: %d pages were not written: %s", lost, reason)
        return count, written

    def _write_file(self, path: Path, record: PageRecord, before: Sequence[PageRecord]) -> bool:
        """Writes a file, and deletes others for it. Returns whether there was room."""
        parts = record.parts()
        size = sum(len(part) for part in parts)
        if size > self._capacity:
            return False
        parent = record.address.parent
        is_useful = parent == record.identity or self._exists(parent)
        limit = self._capacity * (1 if is_useful else _LEFT_AFTER_EVICTION)
        used = self._used()
        # Counted first: after a crash the sum is too large, until files are counted again.
        if used is not None and used + size <= limit:
            self._set_used(used + size)
        elif not is_useful:
            return False
        else:
            self._touch_all(before)
            chain, _ = self._chain(record.address)
            # Never those before it: without them nobody finds it.
            used = self._remove_unused(size, chain)
            if used > self._capacity:
                self._set_used(used - size)
                return False
        path.parent.mkdir(exist_ok=True)
        with atomic_file(path, durable=False) as file:
            file.writelines(parts)
        return True

    # The order of use.

    def _chain(self, address: PageAddress) -> tuple[list[bytes], bytes]:
        """Returns the digests of a page and of all pages before it that are known, the first page
        first, and the parent of the first one."""
        addresses = address.chain()
        before: list[bytes] = []
        parent = addresses[0].parent
        while (grandparent := self._parents.get(parent)) is not None:
            before.append(parent)
            parent = grandparent
        return [*reversed(before), *(each.digest for each in addresses)], parent

    def _touch(self, address: PageAddress, root: bytes) -> None:
        """Makes a page and all pages before it the most recently used, the first page last. If one
        of them is missing, those after it become the least recently used. ``root`` is the cache's
        identity."""
        chain, parent = self._chain(address)
        with self._changed:
            now = max(time.time_ns(), self._last_use + 1)
            self._last_use = now + len(chain)
        is_found = parent == root or self._exists(parent)
        for after, digest in zip(range(len(chain), 0, -1), chain, strict=True):
            at = now + after if is_found else after
            try:
                os.utime(self._path(digest), ns=(at, at))
            except FileNotFoundError:
                self._parents.pop(digest, None)
                is_found = False
            except OSError:  # it may be another user's
                continue

    def _touch_all(self, records: Sequence[PageRecord]) -> None:
        """Makes pages and those before them the most recently used."""
        parents = {record.address.parent for record in records}
        for record in records:
            if record.address.digest not in parents:
                self._touch(record.address, record.identity)

    # The directory's size.

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Runs the block while no other process writes."""
        with (self._directory / "lock").open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _used(self) -> int | None:
        """Returns the number of bytes of all files, or None if it is unknown."""
        try:
            return int((self._directory / "used").read_text())
        except (OSError, ValueError):
            return None

    def _set_used(self, used: int) -> None:
        (self._directory / "used").write_text(str(used))
        with self._changed:
            self._stats = self._stats.plus(used=used - self._stats.used_bytes)

    def _remove_unused(self, needed: int = 0, protected: Sequence[bytes] = ()) -> int:
        """Deletes what killed writers left behind, and the least recently used files if all files
        and ``needed`` more bytes exceed the capacity. Returns the sum of the others' bytes and
        ``needed``."""
        protected_names = {self._path(digest).name for digest in protected}
        files: list[tuple[int, int, Path]] = []
        # Nothing else that is in the directory is touched.
        for folder in self._directory.glob(_FOLDERS):
            remove_partial_files(folder)
            for path in folder.glob(_FILES):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    files.append((status.st_mtime_ns, status.st_size, path))
        used = sum(size for _, size, _ in files) + needed
        least = sum(size for _, size, path in files if path.name in protected_names) + needed
        if used > self._capacity >= least:
            for _, size, path in sorted(files):
                if used <= self._capacity * _LEFT_AFTER_EVICTION:
                    break
                if path.name not in protected_names:
                    path.unlink(missing_ok=True)
                    self._parents.pop(bytes.fromhex(path.stem), None)
                    used -= size
        self._set_used(used)
        return used
