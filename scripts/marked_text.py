"""Replaces a generated part of a page, between two comments with its name."""

from __future__ import annotations

from pathlib import Path

from dsv3_jax.files import atomic_write


def replace_between(page: Path, name: str, text: str) -> None:
    """Replaces the text between ``<!-- name: begin -->`` and ``<!-- name: end -->``.

    Raises:
      ValueError: the page does not have both marks, in this order.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, has_begin, rest = page.read_text("utf-8").partition(begin)
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise ValueError(f"{page}: expected {begin} and {end} after it, got one of them or neither")
    atomic_write(page, f"{before}{begin}\n{text}\n{end}{after}")
