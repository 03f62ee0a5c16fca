"""The part of an answer in which stop strings count: after its reasoning, and in its own text."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from dsv3_jax.generation.text import INCOMPLETE, Decoder, TextTracker

_MOST_UNDECIDED = 64  # tokens of white space after which an answer is taken to have no reasoning


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
    reasoning nor inside opaque tokens.

    Args:
      tracker: of the text.
      decoder: the tracker's.
      reasoning: markers of the reasoning; None for an answer without.
      opaque: tokens inside whose text no stop string counts, because readers of the answer do not
        see it.
    """

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
