"""Splits text that arrives in pieces at markers, such as ``<｜tool▁call▁end｜>``."""

from __future__ import annotations

from collections.abc import Callable, Collection


class MarkerReader:
    """Follows one text.

    What it finds does not depend on how the text is split into pieces: text that may be the
    beginning of a marker waits for the next piece.

    Args:
      markers: returns the markers that count now. A marker may be the end of another one, but
        occurs nowhere else in it.
      on_text: receives text between markers, in pieces.
      on_marker: receives a marker. Afterwards other ``markers`` may count.
    """

    def __init__(
        self,
        markers: Callable[[], Collection[str]],
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
        while text:
            # Most pieces of an answer contain no beginning of a marker.
            markers = [marker for marker in self._markers() if marker[0] in text]
            matches = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
            if not matches:
                overlap_size = 0 if is_last else max((overlap(text, m) for m in markers), default=0)
                cut = len(text) - overlap_size
                self._pending = text[cut:]
                if cut:
                    self._on_text(text[:cut])
                return
            at, marker = min(matches)
            if at:
                self._on_text(text[:at])
            text = text[at + len(marker) :]
            self._on_marker(marker)


def overlap(text: str, marker: str) -> int:
    """Returns the length of the longest suffix of text that is a proper prefix of a marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
