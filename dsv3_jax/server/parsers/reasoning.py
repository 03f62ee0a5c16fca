"""Separates reasoning from the answer in text that arrives piece by piece.

Models that reason write ``<think>reasoning</think>answer``. Many of their chat templates end the
prompt with ``<think>``, so that the text begins inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from dsv3_jax.server.parsers.marker_reader import Markers
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
    """Follows one text that begins in a part. An undecided one is reasoning if it begins with
    ``<think>``, after white space at most. The markers ``ends`` end reasoning too, and belong to
    the content."""

    def __init__(self, state: Part, ends: Sequence[str] = ()):
        self._state: Part = state
        self._ends = Markers.of((END, *ends))
        self._blank: list[str] = []  # white space before what decides
        self._pending = ""  # may be the beginning of a tag
        self.is_unclosed = False
        """Whether one of ``ends`` has ended the reasoning, so that ``</think>`` may still come."""

    @classmethod
    def of_prompt(
        cls, tokenizer: Tokenizer, prompt: Sequence[int], ends: Sequence[str] = ()
    ) -> ReasoningParser:
        """Returns the parser of text after a prompt, the ids of a conversation up to the beginning
        of the answer."""
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
        """Returns the new text of both parts, without the tags. Unless the text ``is_last``, a part
        ends before what may be the beginning of a tag."""
        text, self._pending = self._pending + text, ""
        if self._state == "undecided":
            if not text.strip() and not is_last:
                self._blank.append(text)
                return Parts()
            start = text.lstrip()
            if BEGIN.startswith(start) and start != BEGIN and not is_last:
                self._pending = text
                return Parts()
            if start.startswith(BEGIN):
                self._state, text = "reasoning", start.removeprefix(BEGIN)
            else:
                self._state, text = "content", "".join(self._blank) + text
        if self._state == "content":
            return Parts(content=text)
        result = self._ends.find(text)
        if result is None:
            cut = len(text) - (0 if is_last else self._ends.overlap(text))
            self._pending = text[cut:]
            return Parts(reasoning=text[:cut])
        at, end = result
        self._state, self.is_unclosed = "content", end != END
        return Parts(text[:at], text[at:].removeprefix(END))
