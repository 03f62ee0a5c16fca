"""Phrases of messages."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, such as ``"1 layer"`` or ``"1,024 layers"``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def how_to_install(extra: str) -> str:
    """Returns the command that installs an extra of this package."""
    return f"pip install '.[{extra}]' in a clone of dsv3_jax"


def one_line(text: str, most: int) -> str:
    """Returns at most ``most`` characters of text that somebody else wrote, as one line that can be
    shown anywhere. White space becomes single spaces, and other characters that are not printable,
    such as those with which a terminal is controlled, are escaped."""
    return escaped(" ".join(text[: 4 * most].split())[:most])


def escaped(text: str) -> str:
    """Returns text without characters that are not printable, which are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def os_error_message(error: OSError) -> str:
    """Returns the system's message with the name of the file, in one line."""
    file = f"{error.filename}: " if error.filename else ""
    return f"{file}{error.strerror or error}"


def first_and_count(names: Sequence[str]) -> str:
    """Returns the first name and the number of others: ``"a"`` or ``"a and 2 more"``."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
