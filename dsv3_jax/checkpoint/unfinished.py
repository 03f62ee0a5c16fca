"""Directories that appear under their final name only when they are complete."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsv3_jax.files import atomic_write, locked, publish_directory, remove_partial_files

MARKER = ".unfinished.json"
"""File in an unfinished directory with a description of its future content.

Only a writer of the same content may continue it. No file of a checkpoint has this name, because
hidden files are not copied."""


def check_new(destination: Path) -> None:
    """Checks that nothing exists at a path.

    Raises:
      ValueError: something exists there, even if it is a symbolic link to nothing.
    """
    if os.path.lexists(destination):
        link = "the symbolic link " if destination.is_symlink() else ""
        raise ValueError(f"expected a directory that does not exist yet, got {link}{destination}")


def partial_directory(destination: Path) -> Path:
    """Returns the directory that is written until it can be renamed to ``destination``."""
    return destination.with_name(destination.name + ".partial")


@contextlib.contextmanager
def new_directory(destination: Path, content: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Yields a directory to write to, and renames it to ``destination`` when the block ends.

    All files are synced before the rename. After an exception it is not renamed.

    Args:
      content: JSON description of what is written. After an exception or a kill the files remain,
        and the next call with the same description continues with them. With None, an exception
        deletes the files, and the next call deletes what a killed process left.

    Raises:
      ValueError: ``destination`` exists, or another process or thread is writing it.
      OSError: the disk is full or failed.
    """
    check_new(destination)
    partial = partial_directory(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    busy = f"{destination}: another process is writing it"
    with locked(partial.with_name(partial.name + ".lock"), busy):
        check_new(destination)  # again, because another process may have finished meanwhile
        marker = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        if content is None or not _has_marker(partial, marker):
            _delete(partial)
            partial.mkdir()
            if content is not None:
                atomic_write(partial / MARKER, marker)
        remove_partial_files(partial)
        try:
            yield partial
            (partial / MARKER).unlink(missing_ok=True)
            publish_directory(partial, destination)
        except BaseException:
            if content is None:
                shutil.rmtree(partial, ignore_errors=True)
            raise


def _has_marker(partial: Path, marker: str) -> bool:
    if partial.is_symlink() or not (partial / MARKER).is_file():
        return False
    return (partial / MARKER).read_bytes() == marker.encode()


def _delete(partial: Path) -> None:
    if partial.is_symlink() or partial.is_file():
        partial.unlink()
    elif partial.exists():
        shutil.rmtree(partial)
