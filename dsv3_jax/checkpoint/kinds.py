"""Kinds of directories that users pass to commands, and the command that accepts each."""

from __future__ import annotations

import os
from pathlib import Path

from dsv3_jax.checkpoint import journal
from dsv3_jax.checkpoint.unfinished import MARKER

MANIFEST = "manifest.json"
"""File whose presence marks a store as complete."""

_RUN = "run.json"  # of a training run, whose package must not be imported here


def is_store(directory: Path) -> bool:
    """Returns whether a directory is a store, complete or unfinished."""
    return any((directory / name).is_file() for name in (MANIFEST, journal.NAME))


def is_checkpoint(directory: Path) -> bool:
    """Returns False for directories without loadable weights: training runs and unfinished exports.

    Any other directory may be a checkpoint.
    """
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
