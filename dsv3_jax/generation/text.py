"""The text of generated tokens: stop strings and streaming across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

INCOMPLETE = "\ufffd"
"""Replacement character, to which decoders map the bytes of an incomplete character."""

_TAIL_TOKENS = 12  # length of the tail at which it is split; all of it is decoded for every token
_BLOCK_TOKENS = 64  # tokens in which stop strings are looked for at once
_MIN_TOKENS_AFTER_SPLIT = 4  # no character has more bytes
_SPLIT_ATTEMPTS = 8  # positions that are tried


@runtime_checkable
class Decoder(Protocol):
    """The part of a tokenizer that :class:`TextTracker` needs."""

    def decode(self, ids: Sequence[int], /) -> str: ...


class TextTracker:
    """Text of one request, updated as its tokens arrive, in time linear in their number.

    The text is not the concatenation of the tokens' texts: a stop string may span tokens, and a
    token may contain the end of one character and the start of the next. So the last tokens, the
    tail, are decoded again together with new ones. Text before the tail is final. It is split off
    where decoding both parts separately gives the same text as decoding the tail, which is the case
    between characters only.

    Args:
      min_tokens: number of tokens in whose text no stop string may begin.
    """

    def __init__(self, decoder: Decoder | None, stop: Sequence[str], min_tokens: int = 0):
        self._decoder = decoder
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._search_from = 0  # character from which on stop strings count
        # Number of characters of final text in which a stop string may begin.
        self._overlap = max((len(s) - 1 for s in self._stop), default=0)
        self._final: list[str] = []
        self._final_length = 0  # characters
        self._tail = ""
        self._tail_start = 0  # index of its first token
        self._split_at = _TAIL_TOKENS  # length of the tail, in tokens, at which to split it
        self._streamed = 0  # characters returned by `piece`
        self.tokens: list[int] = []
        """All tokens, up to and including the one that completes a stop string."""
        self.stopped = False
        """Whether a stop string has appeared."""

    @property
    def text(self) -> str:
        """Text of all tokens, cut before the stop string."""
        return self._text_from(0)

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds new tokens, up to and including the one that completes a stop string."""
        if self._decoder is None:
            self.tokens += tokens
            return
        if 0 < (early := self._min_tokens - len(self.tokens)) < len(tokens):
            self.extend(tokens[:early])
            tokens = tokens[early:]
        # A block in which a stop string appears is decoded once more for each of its tokens.
        block = _BLOCK_TOKENS if self._stop else max(len(tokens), 1)
        for start in range(0, len(tokens), block):
            self._extend_block(tokens[start : start + block])
            if self.stopped:
                return
            self._split_tail()

    def extend_quietly(self, tokens: Sequence[int]) -> None:
        """Adds new tokens in whose text no stop string counts, not even in a part of it."""
        self._min_tokens = max(self._min_tokens, len(self.tokens) + len(tokens))
        self.extend(tokens)

    def _extend_block(self, tokens: Sequence[int]) -> None:
        count = len(self.tokens)
        self.tokens += tokens
        self._tail = self._decode(self._tail_start, len(self.tokens))
        if not self._stop:
            return
        if count < self._min_tokens:
            self._search_from = self._final_length + len(self._tail.rstrip(INCOMPLETE))
            return
        # Text before this character has been searched already.
        begin = max(self._final_length - self._overlap, 0)
        before = self._text_from(begin)[: self._final_length - begin]
        skipped = max(self._search_from - begin, 0)
        if not self._stop_positions(before + self._tail, skipped):
            return
        # Finds the first token that completes a stop string. Later tokens of the block may complete
        # another one that begins further left.
        positions: list[int] = []
        while not positions:
            count += 1
            text = before + self._decode(self._tail_start, count)
            positions = self._stop_positions(text, skipped)
        del self.tokens[count:]
        self._tail = self._decode(self._tail_start, count)
        text = self.text[: begin + min(positions)]
        self._final, self._final_length, self._tail = [text], len(text), ""
        self.stopped = True

    def _split_tail(self) -> None:
        """Splits a long tail at the last possible position; the text before it becomes final."""
        end = len(self.tokens)
        if end - self._tail_start < self._split_at:
            return
        last = end - _MIN_TOKENS_AFTER_SPLIT
        for split in range(last, max(last - _SPLIT_ATTEMPTS, self._tail_start), -1):
            left, right = self._decode(self._tail_start, split), self._decode(split, end)
            # Incomplete characters alone may continue one that begins before the split.
            if right.rstrip(INCOMPLETE) and left + right == self._tail:
                self._final.append(left)
                self._final_length += len(left)
                self._tail_start, self._tail = split, right
                self._split_at = _TAIL_TOKENS
                return
        self._split_at = 2 * (end - self._tail_start)  # keeps failed attempts rare

    def _stop_positions(self, text: str, skipped: int) -> list[int]:
        """Returns where in the text each stop string that it contains begins, without its first
        ``skipped`` characters."""
        return [position for s in self._stop if (position := text.find(s, skipped)) >= 0]

    def _decode(self, begin: int, end: int) -> str:
        assert self._decoder is not None
        return self._decoder.decode(self.tokens[begin:end])

    def _text_from(self, begin: int) -> str:
        """Returns the text from character ``begin`` on, without joining all of the text."""
        if begin >= self._final_length:
            return self._tail[begin - self._final_length :]
        parts, start = [self._tail], self._final_length
        for part in reversed(self._final):
            if start <= begin:
                break
            parts.append(part)
            start -= len(part)
        return "".join(reversed(parts))[max(begin - start, 0) :]

    def piece(self, *, final: bool) -> str:
        """Returns the text that no earlier piece contained.

        Unless ``final``, it ends before what later tokens may still change: an incomplete
        character, and the beginning of a stop string.
        """
        if self._decoder is None:
            return ""
        piece = self._text_from(self._streamed)
        if not (final or self.stopped):
            piece = piece.rstrip(INCOMPLETE)
            overlap = max((_overlap(piece, s) for s in self._stop), default=0)
            piece = piece[: len(piece) - overlap]
        self._streamed += len(piece)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
