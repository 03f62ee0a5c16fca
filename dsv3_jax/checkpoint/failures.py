"""What the system said when a file failed, in one line with the file's name."""

from __future__ import annotations


def said(error: OSError) -> str:
    """The complaint and its file."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"
