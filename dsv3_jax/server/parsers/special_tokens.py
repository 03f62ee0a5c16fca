"""Leaves special tokens out of text that arrives piece by piece.

The engine keeps them in the text of answers with tools, because they are part of the markup of tool
calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsv3_jax.server.parsers.marker_reader import MarkerReader


class SpecialTokenFilter:
    """Follows one text.

    Args:
      tokens: texts of the special tokens.
    """

    def __init__(self, tokens: Sequence[str]):
        self._firsts = {token[0] for token in tokens}
        self._parts: list[str] = []
        self._has_pending = False
        self._reader = MarkerReader(lambda: tokens, self._parts.append, lambda token: None)

    def add(self, text: str, *, is_last: bool = False) -> str:
        """Returns the text up to what may be the beginning of a token, unless it ``is_last``."""
        # DeepSeek's vocabularies have hundreds of special tokens. Most pieces need no search.
        if not self._has_pending and self._firsts.isdisjoint(text):
            return text
        self._has_pending = not is_last
        self._reader.add(text, is_last=is_last)
        text = "".join(self._parts)
        self._parts.clear()
        return text
