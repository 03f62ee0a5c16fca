"""A directory while it is written: beside its destination, locked, and renamed when it is whole."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsv3_jax.files import atomic_write, locked, publish_directory, remove_partial_files

MARK = ".unfinished.json"
"""Says what the directory is going to be, so that only the same writing is resumed in it. No file
of a checkpoint has this name: those that begin with a dot are not kept."""


def check_new(destination: Path) -> None:
    """
    Raises:
      ValueError: there is something at ``destination``, if only a symbolic link to nothing.
    """
    if os.path.lexists(destination):
        link = "the symbolic link " if destination.is_symlink() else ""
        raise ValueError(f"expected a directory that does not exist yet, got {link}{destination}")


def partial_of(destination: Path) -> Path:
    """The directory that is written to until it becomes ``destination``."""
    return destination.with_name(destination.name + ".partial")


@contextlib.contextmanager
def new_directory(destination: Path, mark: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Yields a directory to write to, which becomes ``destination`` when the block ends without an
    exception: all of its files are synced, then it is renamed.

    Args:
      mark: what is being written, in JSON. After an exception or a kill the files stay, and the
        next call with the same mark finds them. With None they are deleted, and what a killed
        process left is deleted by the next call.

    Raises:
      ValueError: ``destination`` exists, or another process or thread is writing it.
      OSError: the disk is full or failed.
    """
    check_new(destination)
    partial = partial_of(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    busy = f"{destination}: another process is writing it"
    with locked(partial.with_name(partial.name + ".lock"), busy):
        check_new(destination)  # once more: another process may have ended before the lock was had
        content = json.dumps(mark, indent=2, ensure_ascii=False) + "\n"
        if mark is None or not _has_mark(partial, content):
            _delete(partial)
            partial.mkdir()
            if mark is not None:
                atomic_write(partial / MARK, content)
        remove_partial_files(partial)
        try:
            yield partial
            (partial / MARK).unlink(missing_ok=True)
            publish_directory(partial, destination)
        except BaseException:
            if mark is None:
                shutil.rmtree(partial, ignore_errors=True)
            raise


def _has_mark(partial: Path, content: str) -> bool:
    if partial.is_symlink() or not (partial / MARK).is_file():
        return False
    return (partial / MARK).read_bytes() == content.encode()


def _delete(partial: Path) -> None:
    if partial.is_symlink() or partial.is_file():
        partial.unlink()
    elif partial.exists():
        shutil.rmtree(partial)
