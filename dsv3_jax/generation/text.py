"""Generated tokens as text: stop strings and streaming, right across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

INCOMPLETE = "\ufffd"  # how decoders show the bytes of an unfinished character

_TAIL = 64  # tokens that are decoded again with the next ones; more of them are settled
_CONTEXT = 4  # tokens behind a cut: more than the bytes of a character
_CUTS = 8  # places tried for a cut


@runtime_checkable
class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int], /) -> str: ...


class TextTracker:
    """Follows one request's text as its tokens arrive, in time linear in their number.

    A stop string may span tokens, and a token may hold the end of one character and the start of
    the next, so the text is not the sum of the tokens' texts. The last tokens, the tail, are
    decoded again together with new ones. Text before the tail is settled: it is cut off where the
    text of the tail equals the texts of both parts, which is so between characters only.
    """

    def __init__(self, decoder: Decoder | None, stop: Sequence[str]):
        self._decoder = decoder
        self._stop = tuple(stop)
        self._reach = max((len(s) - 1 for s in self._stop), default=0)
        self._settled: list[str] = []
        self._settled_length = 0  # characters
        self._tail_start = 0  # tokens before it are settled
        self._tail = ""
        self._settle_at = _TAIL  # length of the tail, in tokens
        self._sent = 0  # characters
        self.tokens: list[int] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far, without the stop string."""
        return self._since(0)

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes new tokens, up to and including the one that completes a stop string."""
        # Where a stop string may be found, all its block is decoded token by token.
        block = _TAIL if self._stop else max(len(tokens), 1)
        for at in range(0, len(tokens), block):
            self._take(tokens[at : at + block])
            if self.stopped:
                return
            self._settle()

    def _take(self, tokens: Sequence[int]) -> None:
        count = len(self.tokens)
        self.tokens += tokens
        self._tail = self._decode(self._tail_start, len(self.tokens))
        # Text before these characters has been searched already.
        begin = max(self._settled_length - self._reach, 0)
        before = self._since(begin)[: self._settled_length - begin]
        if not self._stops(before + self._tail):
            return
        found: list[int] = []
        while not found:
            # One by one: tokens past the end may complete a stop string that begins further left.
            count += 1
            found = self._stops(before + self._decode(self._tail_start, count))
        del self.tokens[count:]
        self._tail = self._decode(self._tail_start, count)
        text = self.text[: begin + min(found)]
        self._settled, self._settled_length, self._tail = [text], len(text), ""
        self.stopped = True

    def _settle(self) -> None:
        """Moves the start of a long tail to the last place where it may be cut."""
        end = len(self.tokens)
        if self._decoder is None or end - self._tail_start < self._settle_at:
            return
        for cut in range(end - _CONTEXT, end - _CONTEXT - _CUTS, -1):
            left, right = self._decode(self._tail_start, cut), self._decode(cut, end)
            # Unfinished characters alone do not show that they continue none before the cut.
            if right.rstrip(INCOMPLETE) and left + right == self._tail:
                self._settled.append(left)
                self._settled_length += len(left)
                self._tail_start, self._tail = cut, right
                self._settle_at = _TAIL
                return
        self._settle_at = 2 * (end - self._tail_start)  # few attempts, even if all of them fail

    def _stops(self, text: str) -> list[int]:
        """Where the stop strings found in the text begin."""
        return [at for s in self._stop if (at := text.find(s)) >= 0]

    def _decode(self, begin: int, end: int) -> str:
        return "" if self._decoder is None else self._decoder.decode(self.tokens[begin:end])

    def _since(self, begin: int) -> str:
        """The text from that character on."""
        parts, at = [self._tail], self._settled_length
        for part in reversed(self._settled):
            if at <= begin:
                break
            parts.append(part)
            at -= len(part)
        return "".join(reversed(parts))[max(begin - at, 0) :]

    def piece(self, *, final: bool) -> str:
        """Text not handed out yet. Unless ``final``, keeps back what later tokens may still change:
        an unfinished character, and the beginning of a stop string."""
        new = self._since(self._sent)
        if not (final or self.stopped):
            new = new.rstrip(INCOMPLETE)
            new = new[: len(new) - max((_overlap(new, s) for s in self._stop), default=0)]
        self._sent += len(new)
        return new


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
