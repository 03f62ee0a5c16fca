"""Atomic writes, file locks, free space, and checks of file names that come from data."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

_LONGEST_NAME = 255  # bytes; the limit of common file systems
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.partial", re.DOTALL)
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP)


def atomic_write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes bytes, or text as UTF-8 without changing line ends, atomically: other processes, and
    this machine after a power cut, see either the whole new content or the previous state.

    See :func:`atomic_file` for permissions and symbolic links. Raises OSError, which names the
    file, if the disk is full or failed, or the directory cannot be written to. Then no temporary
    file remains, and an existing file is unchanged.
    """
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[BinaryIO]:
    """Yields a binary file that appears at ``path`` when the block ends without an exception.

    The content goes to a temporary file in the same directory, under a name that no other writer
    uses. The file is synced and renamed, then the directory is synced. An exception inside the
    block deletes the temporary file. Only a killed process leaves it behind, as
    ``.NAME.TOKEN.partial``.

    A new file gets the permissions that ``open`` would give it. A file that replaces another keeps
    the permissions of the old one. A symbolic link stays, and the file it points to is replaced or
    created, as ``open(path, "w")`` would do. A device or a pipe, such as ``/dev/stdout``, is
    written to directly.

    Args:
      durable: whether the file is synced. Without that, other processes still see all or nothing,
        but a power cut can leave a damaged file.

    Raises:
      OSError: as :func:`atomic_write` documents. If only the sync of the directory fails, the new
        file already exists.
    """
    target = Path(os.path.realpath(path))
    with naming(Path(path)):
        mode = _mode_of(target)
        if mode is not None and not stat.S_ISREG(mode):
            with target.open("wb") as file:
                yield file
            return
        partial = target.with_name(f".{target.name[:50]}.{secrets.token_hex(4)}.partial")
        with _created(partial, path) as file:
            try:
                if mode is not None and stat.S_IMODE(os.fstat(file.fileno()).st_mode) != (
                    stat.S_IMODE(mode)
                ):
                    os.fchmod(file.fileno(), stat.S_IMODE(mode))
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
                partial.replace(target)
            except BaseException:
                with contextlib.suppress(OSError):  # the first failure is the one to report
                    partial.unlink()
                raise
        if durable:
            sync_directory(target.parent)


@contextlib.contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Runs the block under an exclusive lock against other processes and threads. The lock file at
    ``path`` is created on entry and deleted on exit; one that a killed process left behind does not
    lock.

    Raises:
      ValueError: another process or thread has the lock. The message is ``busy``.
      OSError: the file cannot be created, or the file system has no locks.
    """
    with contextlib.ExitStack() as stack:
        while True:
            file = path.open("ab")
            try:
                lock_file(file, busy)
            except BaseException:
                file.close()
                raise
            if is_at(file, path):
                stack.callback(file.close)
                break
            file.close()  # its owner ended meanwhile and deleted the file
        stack.callback(path.unlink, missing_ok=True)
        yield


def lock_file(file: IO[bytes], busy: str) -> None:
    """Locks an open file until it is closed. Raises the same errors as :func:`locked`."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(busy) from None


def is_at(file: IO[bytes], path: Path) -> bool:
    """Returns whether an open file is still at ``path``, neither deleted nor replaced."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def remove_partial_files(directory: Path) -> None:
    """Deletes temporary files of :func:`atomic_file` that killed processes left in a directory, but
    not in its subdirectories. The caller ensures that no other process is writing there."""
    for path in directory.iterdir():
        if _PARTIAL.fullmatch(path.name) and not path.is_dir():
            path.unlink(missing_ok=True)


def publish_directory(partial: Path, directory: Path) -> None:
    """Renames a finished directory to its final name, and syncs everything in it before, and the
    rename after. Raises OSError if the disk failed, or ``directory`` exists and is not empty."""
    sync_tree(partial)
    partial.rename(directory)
    sync_directory(directory.absolute().parent)


def sync_tree(directory: Path) -> None:
    """Syncs a directory and all files and directories below it to the disk."""
    for folder, _, files in os.walk(directory):
        for file in files:
            descriptor = os.open(os.path.join(folder, file), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(folder))


def sync_directory(directory: Path) -> None:
    """Makes the creations, renames and deletions in a directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems sync directories by themselves and refuse the call.
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def free_bytes(directory: Path) -> int:
    """Returns the free space of the disk that a directory is on, or will be created on."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def check_free(directory: Path, needed: int) -> None:
    """Raises ValueError if the disk that a directory is on has less free space."""
    if needed > (free := free_bytes(directory)):
        raise ValueError(f"{directory}: expected {needed:,} bytes of free disk, got {free:,}")


def check_file_name(name: object, where: object, suffix: str = "") -> str:
    """Returns ``name`` if it is a plain file name that ends in ``suffix``. Otherwise raises
    ValueError with one line that begins with ``where``, the file that contains the name, and its
    key.

    Every file name that comes from data (an index, a manifest, a header, a record) is checked here
    before it becomes a path, so that no data can escape its directory. Refused are the separators
    of any system, ``.`` and ``..``, control characters, invalid Unicode, the empty name, names of
    more than 255 bytes, and values that are not strings.
    """
    if (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not any(c in "/\\" or unicodedata.category(c) in ("Cc", "Cs") for c in name)
        and len(name.encode()) <= _LONGEST_NAME
        and name.endswith(suffix)
        and name != suffix
    ):
        return name
    ending = f" ending in {suffix}" if suffix else ""
    raise ValueError(f"{where}: expected a plain file name{ending}, got {name!r:.200}")


def write_failure(directory: Path) -> str | None:
    """Returns why no file can be written to a directory, or None if it can. Creates the directory
    if it does not exist."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return error.strerror or str(error)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file name to OSErrors inside the block. Errors of open files have none."""
    try:
        yield
    except OSError as error:
        if error.filename:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def _mode_of(path: Path) -> int | None:
    """Returns type and permissions of a file, or None if it does not exist."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _created(partial: Path, path: str | os.PathLike[str]) -> BinaryIO:
    try:
        return partial.open("xb")
    except OSError as error:  # the caller knows only the target, not the temporary file
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
