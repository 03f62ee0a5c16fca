"""The text of generated tokens: stop strings and streaming across token boundaries."""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

INCOMPLETE = "\ufffd"
"""Replacement character, to which decoders map the bytes of an incomplete character."""

_MOST_PENDING = 3
"""Most bytes of an incomplete character. A decoder may map each to a character."""

_WINDOW = 8
"""Least tokens before new ones that are decoded with them: more than an incomplete character has
bytes, together with two characters before it."""

_STARTS = 4
"""Positions at which a shorter window may begin; no character has more tokens."""

_BLOCK_TOKENS = 64
"""Most new tokens that are decoded at once."""

_MOST_UNDECIDED = 64  # tokens of white space after which an answer is taken to have no reasoning


@runtime_checkable
class Decoder(Protocol):
    """The part of a tokenizer that :class:`TextTracker` needs."""

    def decode(self, ids: Sequence[int], /) -> str: ...


@runtime_checkable
class _FallbackDecoder(Protocol):
    """A decoder that knows whether it has byte fallback, see
    :attr:`dsv3_jax.tokenizer.Tokenizer.has_byte_fallback`."""

    @property
    def has_byte_fallback(self) -> bool: ...


class TextTracker:
    """Text of one request, updated as its tokens arrive, in time linear in their number.

    The text is not the concatenation of the tokens' texts: a stop string may span tokens, and a
    token may contain the end of one character and the start of the next. So the last tokens, the
    window, are decoded again together with new ones. What follows the part of the window's text
    that was known before is new. Text is settled as soon as later tokens cannot change it: all but
    up to three U+FFFD at its end, which may be the first bytes of a character.

    Settled text never changes. It equals the decoded text of all tokens, with one exception:
    decoders with byte fallback write a whole run of byte tokens as U+FFFD if one of them is
    invalid. Here characters that were complete before stay.

    Args:
      min_tokens: number of tokens in whose text no stop string may begin.
    """

    def __init__(self, decoder: Decoder | None, stop: Sequence[str], min_tokens: int = 0):
        self._decoder = decoder
        self._stop = _automaton(tuple(stop)) if stop else None
        # A stop string may match U+FFFD of a character that the next token completes. With byte
        # fallback, an incomplete character hides those before it.
        by_token = any(INCOMPLETE in s for s in stop) or (
            isinstance(decoder, _FallbackDecoder) and decoder.has_byte_fallback
        )
        self._block = 1 if by_token else _BLOCK_TOKENS
        self._min_tokens = min_tokens
        self._state = 0  # of the automaton, after the settled text
        self._parts: list[str] = []  # of the settled text
        self._length = 0  # of the settled text, in characters
        self._window = _Window([], "", "")
        self._unsent: list[str] = []  # settled text that no piece contained
        self._streamed = 0  # characters returned by `piece`
        self._textless: dict[int, bool] = {}
        self.tokens: list[int] = []
        """All tokens, up to and including the one that completes a stop string."""
        self.stopped = False
        """Whether a stop string has appeared."""

    @property
    def text(self) -> str:
        """Text of all tokens, cut before the stop string."""
        return "".join(self._parts) + self._window.pending

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds new tokens, up to and including the one that completes a stop string."""
        if self._decoder is None:
            self.tokens += tokens
            return
        if 0 < (early := self._min_tokens - len(self.tokens)) < len(tokens):
            self.extend(tokens[:early])
            tokens = tokens[early:]
        for start in range(0, len(tokens), self._block):
            self._add(tokens[start : start + self._block])
            if self.stopped:
                return

    def extend_quietly(self, tokens: Sequence[int]) -> None:
        """Adds new tokens in whose text no stop string counts, not even in a part of it."""
        self._min_tokens = max(self._min_tokens, len(self.tokens) + len(tokens))
        self._state = 0
        self.extend(tokens)

    def _add(self, tokens: Sequence[int]) -> None:
        window, settled = self._extended(tokens)
        state, begin = self._state, None
        if self._stop is not None and len(self.tokens) >= self._min_tokens:
            state, begin = self._stop.search(state, settled)
            if window.pending:
                _, later = self._stop.search(state, window.pending)
                begin = begin if later is None else _least(begin, len(settled) + later)
        if begin is not None and len(tokens) > 1:
            # Later tokens may complete a stop string that begins further left than the one that is
            # complete first.
            for token in tokens:
                self._add([token])
                if self.stopped:
                    return
            return
        self.tokens += tokens
        if begin is not None:
            self.stopped = True
            whole = "".join([*self._parts, settled, window.pending])
            text = whole[: self._length + begin]
            self._parts, self._length = [text], len(text)
            self._unsent = [text[self._streamed :]]
            self._window = _Window([], "", "")
            return
        self._state = state
        self._window = window
        if settled:
            self._parts.append(settled)
            self._unsent.append(settled)
            self._length += len(settled)

    def _extended(self, tokens: Sequence[int]) -> tuple[_Window, str]:
        """Returns the window with new tokens, and the text that has become settled."""
        before = self._window
        all_tokens = [*before.tokens, *tokens]
        text = self._decode(all_tokens)
        known = before.settled
        if not text.startswith(known):
            # A run of byte tokens, which is decoded as a whole, goes on with an incomplete or
            # invalid character.
            rest = [token for token in before.tokens if not self._is_textless(token)]
            all_tokens = [*rest[len(rest) - len(before.pending) :], *tokens]
            text, known = self._decode(all_tokens), ""
        end = max(len(text.rstrip(INCOMPLETE)), len(text) - _MOST_PENDING, len(known))
        settled, pending = text[len(known) : end], text[end:]
        if len(all_tokens) > 2 * _WINDOW:
            all_tokens, text = self._shortened(all_tokens, text, len(pending))
        return _Window(all_tokens, text[: len(text) - len(pending)], pending), settled

    def _shortened(self, tokens: list[int], text: str, pending: int) -> tuple[list[int], str]:
        """Returns the last of some tokens and their text, whose last ``pending`` characters and
        what follows them do not depend on the tokens before."""
        last = len(tokens) - _WINDOW
        for start in range(last, max(last - _STARTS, 0), -1):
            shorter = self._decode(tokens[start:])
            if len(shorter) > pending and text.endswith(shorter):
                return tokens[start:], shorter
        # Every token ends inside a character, or most tokens have no text.
        tokens = [token for token in tokens if not self._is_textless(token)]
        if len(tokens) > 2 * _WINDOW:
            tokens = tokens[-_WINDOW:]
        return tokens, self._decode(tokens)

    def _is_textless(self, token: int) -> bool:
        """Returns whether a token has no text, wherever it is: decoders skip special tokens. Some
        drop a space where text begins, which two tokens show."""
        if token not in self._textless:
            self._textless[token] = not self._decode([token, token])
        return self._textless[token]

    def _decode(self, tokens: list[int]) -> str:
        assert self._decoder is not None
        return self._decoder.decode(tokens)

    def piece(self, *, final: bool) -> str:
        """Returns the text that no earlier piece contained. Unless ``final``, it ends before what
        later tokens may still change: an incomplete character, and the beginning of a stop
        string."""
        if final and self._window.pending:
            pending = self._window.pending
            self._parts.append(pending)
            self._unsent.append(pending)
            self._window = _Window([], "", "")
        text = "".join(self._unsent)
        overlap = 0
        if self._stop is not None and not (final or self.stopped):
            overlap = self._stop.depth(self._state)
        piece = text[: len(text) - overlap]
        self._unsent = [text[len(piece) :]] if overlap else []
        self._streamed += len(piece)
        return piece


@dataclasses.dataclass(frozen=True)
class ReasoningMarkers:
    """Texts around the reasoning with which an answer may begin."""

    begin: str
    """Text with which an answer has to begin, after white space, to have reasoning. Empty if it
    begins inside: then the prompt ends with the marker."""
    ends: tuple[str, ...]
    """Texts that end the reasoning: the first that appears."""

    def span(self, text: str) -> tuple[int, int]:
        """Returns where the reasoning of a whole answer begins and ends, without the markers."""
        start = text.lstrip() if self.begin else text
        if not start.startswith(self.begin):
            return 0, 0
        begin = len(text) - len(start) + len(self.begin)
        ends = [end for marker in self.ends if (end := text.find(marker, begin)) >= 0]
        return begin, min(ends, default=len(text))


class StopScope:
    """Hands an answer's tokens to the tracker of its text. Stop strings count neither in the
    reasoning nor inside the text of ``opaque`` tokens, which readers of the answer do not see."""

    def __init__(
        self,
        tracker: TextTracker,
        decoder: Decoder,
        reasoning: ReasoningMarkers | None,
        opaque: Collection[int] = (),
    ):
        self._tracker = tracker
        self._decoder = decoder
        self._opaque = opaque
        self._begin = reasoning.begin if reasoning else ""
        # Finds the end of the reasoning: None after it.
        self._end = TextTracker(decoder, reasoning.ends) if reasoning else None
        self._undecided: list[int] = []  # it is undecided whether they begin reasoning

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return len(self._tracker.tokens) + len(self._undecided)

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds new tokens, up to and including the one that completes a stop string."""
        rest = list(tokens)
        if self._begin:
            self._undecided += rest
            is_reasoning = self._is_reasoning()
            if is_reasoning is None:
                return
            self._begin, rest, self._undecided = "", self._undecided, []
            if not is_reasoning:
                self._end = None
        while rest and self._end is not None:
            self._end.extend(rest[:1])
            self._tracker.extend_quietly(rest[:1])
            del rest[0]
            if self._end.stopped:
                self._end = None
        while rest and not self._tracker.stopped:
            count = next((i for i, token in enumerate(rest) if token in self._opaque), len(rest))
            self._tracker.extend(rest[:count])
            if count < len(rest) and not self._tracker.stopped:
                self._tracker.extend_quietly([rest[count]])
            del rest[: count + 1]

    def end(self) -> None:
        """Ends the answer: what was undecided is no reasoning."""
        rest, self._undecided = self._undecided, []
        self._begin, self._end = "", None
        self.extend(rest)

    def _is_reasoning(self) -> bool | None:
        """Returns whether the answer has reasoning, or None while that is undecided."""
        text = self._decoder.decode(self._undecided).rstrip(INCOMPLETE).lstrip()
        if text.startswith(self._begin):
            return True
        return (
            None
            if self._begin.startswith(text) and len(self._undecided) < _MOST_UNDECIDED
            else False
        )


class _Window(NamedTuple):
    """The last tokens, and their text."""

    tokens: list[int]
    settled: str
    pending: str  # text after ``settled`` that later tokens may change


class StopStrings:
    """Finds strings in text that arrives in parts, in time linear in the text.

    It is the automaton of Aho and Corasick: its state is the longest end of the text that begins a
    string. Most states are followed by one state alone, which is the next one.

    Args:
      strings: none of them is empty.
    """

    def __init__(self, strings: Sequence[str]):
        self._labels = [""]  # character that leads from a state to the next one
        self._branches: dict[int, dict[str, int]] = {}  # other states that follow a state
        parents, characters = array("i", [0]), [""]  # how a state is reached
        self._depths = array("i", [0])  # length of a state's text
        self._ends = array("i", [0])  # length of the longest string that ends in a state, or 0
        for string in strings:
            state = 0
            for character in string:
                following = self._following(state, character)
                if following is None:
                    following = len(self._depths)
                    if following == state + 1:
                        self._labels[state] = character
                    else:
                        self._branches.setdefault(state, {})[character] = following
                    self._labels.append("")
                    parents.append(state)
                    characters.append(character)
                    self._depths.append(self._depths[state] + 1)
                    self._ends.append(0)
                state = following
            self._ends[state] = len(string)
        # State of the longest end of a state's text, itself excepted.
        self._shorter = array("i", [0]) * len(self._depths)
        for state in sorted(range(1, len(self._depths)), key=self._depths.__getitem__):
            if parents[state]:
                shorter = self._shorter[parents[state]]
                self._shorter[state], _ = self.search(shorter, characters[state])
            self._ends[state] = max(self._ends[state], self._ends[self._shorter[state]])

    def depth(self, state: int) -> int:
        """Returns the length of the longest end of the text that begins a string."""
        return self._depths[state]

    def search(self, state: int, text: str) -> tuple[int, int | None]:
        """Returns the state after more text, and where the leftmost string that ends in it begins,
        counted from the beginning of ``text``; None if there is none."""
        labels, branches, shorter, ends = self._labels, self._branches, self._shorter, self._ends
        begin = None
        for end, character in enumerate(text, 1):
            while labels[state] != character:
                if state in branches and character in branches[state]:
                    state = branches[state][character]
                    break
                if not state:
                    break
                state = shorter[state]
            else:
                state += 1
            if length := ends[state]:
                begin = _least(begin, end - length)
        return state, begin

    def _following(self, state: int, character: str) -> int | None:
        if self._labels[state] == character:
            return state + 1
        branches = self._branches.get(state)
        return None if branches is None else branches.get(character)


@functools.lru_cache(maxsize=16)
def _automaton(stop: tuple[str, ...]) -> StopStrings:
    """Returns the automaton of stop strings, which all completions of a request share."""
    return StopStrings(stop)


def _least(first: int | None, second: int) -> int:
    return second if first is None else min(first, second)
