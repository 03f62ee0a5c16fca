"""Kinds of directories that people pass to a command, and the command for each."""

from __future__ import annotations

import os
from pathlib import Path

from dsv3_jax.checkpoint import journal
from dsv3_jax.checkpoint.unfinished import MARK

MANIFEST = "manifest.json"
"""Its presence marks a store as whole."""

_RUN = "run.json"  # of a training run, whose package this one does not import


def is_store(directory: Path) -> bool:
    """Whether a conversion made the directory, be it whole or not."""
    return any((directory / name).is_file() for name in (MANIFEST, journal.NAME))


def is_checkpoint(directory: Path) -> bool:
    """False for directories that hold no weights which a model loads: those of training runs, and
    exports that are not whole."""
    return is_store(directory) or not any((directory / name).is_file() for name in (MARK, _RUN))


def describe(path: Path) -> str:
    """What there is at ``path``, with the command that takes it; for error messages."""
    if not path.exists():
        return "a symbolic link to nothing" if path.is_symlink() else "no such directory"
    if not path.is_dir():
        return "a file"
    kinds = {
        MANIFEST: "a store (dsv3 export writes it as a Hugging Face directory)",
        journal.NAME: "an unfinished conversion (dsv3 convert --resume continues it)",
        MARK: "an unfinished export (the same dsv3 export command continues it)",
        _RUN: "a training run (dsv3 export writes its model as a Hugging Face directory)",
        "config.json": "a Hugging Face directory (dsv3 convert makes a store of it)",
    }
    for name, kind in kinds.items():
        if (path / name).is_file():
            return kind
    if not os.listdir(path):
        return "an empty directory"
    return f"a directory without {MANIFEST} and config.json"
