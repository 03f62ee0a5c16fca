"""Leaves special tokens out of text that arrives piece by piece.

The engine keeps them in the text of answers with tools, because they are part of the markup of tool
calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsv3_jax.server.parsers.marker_reader import MarkerReader, Markers


class SpecialTokenFilter:
    """Follows one text.

    Args:
      tokens: texts of the special tokens.
    """

    def __init__(self, tokens: Sequence[str]):
        markers = Markers.of(tuple(tokens))
        self._parts: list[str] = []
        self._reader = MarkerReader(lambda: markers, self._parts.append, lambda token: None)

    def add(self, text: str, *, is_last: bool = False) -> str:
        """Returns the text up to what may be the beginning of a token, unless it ``is_last``."""
        self._reader.add(text, is_last=is_last)
        text = "".join(self._parts)
        self._parts.clear()
        return text
