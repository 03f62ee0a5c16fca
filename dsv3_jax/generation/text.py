"""Generated tokens as text: stop strings and streaming, right across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

INCOMPLETE = "\ufffd"  # how decoders show the bytes of an unfinished character


@runtime_checkable
class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int], /) -> str: ...


class TextTracker:
    """Follows one request's text as its tokens arrive.

    A stop string may span tokens, and a token may hold the end of one character and the start of
    the next, so the text is always decoded from all tokens so far.
    """

    def __init__(self, decoder: Decoder | None, stop: Sequence[str]):
        self._decoder = decoder
        self._stop = tuple(stop)
        self._sent = 0
        self.tokens: list[int] = []
        self.text = ""
        self.stopped = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes new tokens, up to and including the one that completes a stop string."""
        held = len(self.tokens)
        self.tokens += tokens
        self.text = self._decode(self.tokens)
        if not self._stops(self.text):
            return
        while not self._stops(self._decode(self.tokens[: held + 1])):
            held += 1
        del self.tokens[held + 1 :]
        # Decoded anew: tokens past the end may complete a stop string that begins further left.
        text = self._decode(self.tokens)
        self.text = text[: min(self._stops(text))]
        self.stopped = True

    def _stops(self, text: str) -> list[int]:
        """Where the stop strings found in the text begin."""
        return [at for s in self._stop if (at := text.find(s)) >= 0]

    def _decode(self, tokens: Sequence[int]) -> str:
        return "" if self._decoder is None else self._decoder.decode(tokens)

    def piece(self, *, final: bool) -> str:
        """Text not handed out yet. Unless ``final``, keeps back what later tokens may still change:
        an unfinished character, and the beginning of a stop string."""
        end = len(self.text)
        if not (final or self.stopped):
            while end > self._sent and self.text[end - 1] == INCOMPLETE:
                end -= 1
            end -= max((_overlap(self.text[:end], s) for s in self._stop), default=0)
        new = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return new


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
