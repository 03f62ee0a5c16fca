"""Separates reasoning from the answer in text that arrives piece by piece.

Models that reason write ``<think>reasoning</think>answer``. Many of their chat templates end the
prompt with ``<think>``, so that the text begins inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from dsv3_jax.tokenizer import Tokenizer

BEGIN, END = "<think>", "</think>"

Part = Literal["undecided", "reasoning", "content"]
"""A part of the text. It is undecided where it may begin with either of the others."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """New text of both parts."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Follows one text.

    Args:
      state: part in which the text begins. ``"undecided"`` means that it is reasoning if it begins
        with ``<think>``, after white space at most.
      ends: markers that end reasoning in place of ``</think>``, and belong to the content.
    """

    def __init__(self, state: Part, ends: Sequence[str] = ()):
        self._state: Part = state
        self._ends = (END, *ends)
        self._pending = ""  # may be the beginning of a tag

    @classmethod
    def of_prompt(
        cls, tokenizer: Tokenizer, prompt: Sequence[int], ends: Sequence[str] = ()
    ) -> ReasoningParser:
        """Returns the parser of text after a prompt.

        Args:
          prompt: ids of a conversation up to the beginning of the answer.
          ends: see the class.
        """
        tag = tokenizer.encode(END, add_special_tokens=False, split_special_tokens=False)
        if len(tag) != 1:
            return cls("content")  # the model knows no reasoning
        end = tokenizer.decode(prompt[-4:], skip_special_tokens=False).rstrip()
        if end.endswith(BEGIN):
            return cls("reasoning", ends)
        return cls("content" if end.endswith(END) else "undecided", ends)

    @property
    def part(self) -> Part:
        """The part that the text is in."""
        return self._state

    def add(self, text: str, *, is_last: bool = False) -> Parts:
        """Returns the new text of both parts, without the tags.

        A part ends before what may be the beginning of a tag, unless the text ``is_last``.
        """
        text, self._pending = self._pending + text, ""
        reasoning = ""
        if self._state == "undecided":
            start = text.lstrip()
            if start.startswith(BEGIN):
                self._state, text = "reasoning", start.removeprefix(BEGIN)
            elif BEGIN.startswith(start) and not is_last:
                self._pending = text
                return Parts()
            else:
                self._state = "content"
        if self._state == "reasoning":
            begins = [text.find(end) for end in self._ends if end in text]
            if begins:
                begin = min(begins)
                reasoning, text = text[:begin], text[begin:].removeprefix(END)
                self._state = "content"
            else:
                cut = 0 if is_last else max(_overlap(text, end) for end in self._ends)
                self._pending = text[len(text) - cut :]
                return Parts(reasoning=text[: len(text) - cut])
        return Parts(reasoning, text)


def _overlap(text: str, marker: str) -> int:
    """Returns the length of the longest suffix that is a proper prefix of a marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
