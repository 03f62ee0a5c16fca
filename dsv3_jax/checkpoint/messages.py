"""What the system said when a file failed, in one line with the file's name."""

from __future__ import annotations


def os_error_message(error: OSError) -> str:
    """The complaint and its file."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"
