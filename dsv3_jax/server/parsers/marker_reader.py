"""Splits text that arrives in pieces at markers, such as ``<｜tool▁call▁end｜>``."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence


class Markers:
    """Some markers, prepared for searches whose time does not depend on their number. A marker may
    be the end of another one, but occurs nowhere else in it."""

    def __init__(self, markers: Sequence[str]):
        self._markers = frozenset(markers)
        self._lengths = sorted({len(marker) for marker in markers})
        beginnings = sorted({re.escape(marker[:2]) for marker in markers})
        # Finds where a marker may begin, also if the beginnings overlap.
        self._begin = re.compile(f"(?={'|'.join(beginnings)})" if beginnings else "(?!)")
        self._prefixes = frozenset(marker[:n] for marker in markers for n in range(1, len(marker)))
        self._longest_prefix = max(map(len, self._prefixes), default=0)

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, markers: tuple[str, ...]) -> Markers:
        """Returns prepared markers, which are made once."""
        return cls(markers)

    def find(self, text: str, begin: int = 0) -> tuple[int, str] | None:
        """Returns the first marker in the text from ``begin`` on, and where it begins."""
        for match in self._begin.finditer(text, begin):
            at = match.start()
            for length in self._lengths:
                marker = text[at : at + length]
                if marker in self._markers:
                    return at, marker
        return None

    def overlap(self, text: str, begin: int = 0) -> int:
        """Returns the length of the longest suffix of the text from ``begin`` on that is a proper
        prefix of a marker."""
        longest = min(len(text) - begin, self._longest_prefix)
        return next((n for n in range(longest, 0, -1) if text[-n:] in self._prefixes), 0)


class MarkerReader:
    """Follows one text, in time linear in its length, by the ``markers`` that count now; others may
    count after one. What it finds does not depend on how the text is split into pieces: text that
    may be the beginning of a marker waits for the next piece."""

    def __init__(
        self,
        markers: Callable[[], Markers],
        on_text: Callable[[str], None],
        on_marker: Callable[[str], None],
    ):
        self._markers = markers
        self._on_text = on_text
        self._on_marker = on_marker
        self._pending = ""

    def add(self, text: str, *, is_last: bool = False) -> None:
        """Reads the next piece. After the last one, a new text may begin."""
        text, self._pending = self._pending + text, ""
        begin = 0
        while begin < len(text):
            markers = self._markers()
            result = markers.find(text, begin)
            if result is None:
                cut = len(text) - (0 if is_last else markers.overlap(text, begin))
                self._pending = text[cut:]
                if begin < cut:
                    self._on_text(text[begin:cut])
                return
            at, marker = result
            if begin < at:
                self._on_text(text[begin:at])
            begin = at + len(marker)
            self._on_marker(marker)


class SpecialTokenFilter:
    """Leaves out the special tokens of one text."""

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
