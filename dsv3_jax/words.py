"""Numbers in messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """``"1 layer"``, ``"2 layers"``, ``"1,024 layers"``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
