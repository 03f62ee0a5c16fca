"""What the system says when files fail, in one line with the file's name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Has errors of reading and writing name the file, which those of open files do not."""
    try:
        yield
    except OSError as error:
        if error.filename:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


def said(error: OSError) -> str:
    """The complaint and its file."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"
