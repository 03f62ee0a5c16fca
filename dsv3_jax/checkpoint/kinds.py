"""Kinds of directories that users pass to commands, and the command that accepts each."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsv3_jax.checkpoint import journal
from dsv3_jax.files import atomic_write, locked, publish_directory, remove_partial_files

MARKER = ".unfinished.json"
"""File in an unfinished directory with a description of its future content.

Only a writer of the same content may continue it. No file of a checkpoint has this name, because
hidden files are not copied."""


def check_new(destination: Path) -> None:
    """Checks that nothing exists at a path."""
    if os.path.lexists(destination):
        link = "the symbolic link " if destination.is_symlink() else ""
        raise ValueError(f"expected a directory that does not exist yet, got {link}{destination}")


def partial_directory(destination: Path) -> Path:
    """Returns the directory that is written until it can be renamed to ``destination``."""
    return destination.with_name(destination.name + ".partial")


@contextlib.contextmanager
def new_directory(destination: Path, content: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Yields a directory to write to. When the block ends without an exception, all files are
    synced and the directory is renamed to ``destination``.

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
        is_link, old = partial.is_symlink(), partial / MARKER
        is_continued = content is not None and not is_link and old.is_file()
        if not is_continued or old.read_bytes() != marker.encode():
            if is_link or partial.is_file():
                partial.unlink()
            elif partial.exists():
                shutil.rmtree(partial)
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


MANIFEST = "manifest.json"  # file whose presence marks a store as complete

_RUN = "run.json"  # of a training run, whose package must not be imported here


def is_store(directory: Path) -> bool:
    """Returns whether a directory is a store, complete or unfinished."""
    return any((directory / name).is_file() for name in (MANIFEST, journal.NAME))


def is_checkpoint(directory: Path) -> bool:
    """Returns False for training runs and unfinished exports, which have no loadable weights. Any
    other directory may be a checkpoint."""
    return is_store(directory) or not any((directory / name).is_file() for name in (MARKER, _RUN))


def describe(path: Path) -> str:
    """Returns a description of ``path`` for error messages, with the command that accepts it."""
    if not path.exists():
        return "a symbolic link to nothing" if path.is_symlink() else "no such directory"
    if not path.is_dir():
        return "a file"
    kinds = {
        MANIFEST: "a store (dsv3 export writes it as a Hugging Face directory)",
        journal.NAME: "an unfinished conversion (dsv3 convert --resume continues it)",
        MARKER: "an unfinished export (the same dsv3 export command continues it)",
        _RUN: "a training run (dsv3 export writes its model as a Hugging Face directory)",
        "config.json": "a Hugging Face directory (dsv3 convert makes a store of it)",
    }
    for name, kind in kinds.items():
        if (path / name).is_file():
            return kind
    if not os.listdir(path):
        return "an empty directory"
    return f"a directory without {MANIFEST} and config.json"
