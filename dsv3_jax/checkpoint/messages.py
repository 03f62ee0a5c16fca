"""Phrases that error messages of several modules share."""

from __future__ import annotations

from collections.abc import Sequence


def os_error_message(error: OSError) -> str:
    """Returns the system's message with the name of the file, in one line."""
    file = f"{error.filename}: " if error.filename else ""
    return f"{file}{error.strerror or error}"


def first_and_count(names: Sequence[str]) -> str:
    """Returns the first name and the number of others: ``"a"`` or ``"a and 2 more"``."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
