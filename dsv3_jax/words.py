"""Phrases of messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, such as ``"1 layer"`` or ``"1,024 layers"``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def how_to_install(extra: str) -> str:
    """Returns the command that installs an extra of this package."""
    return f"pip install '.[{extra}]' in a clone of dsv3_jax"
