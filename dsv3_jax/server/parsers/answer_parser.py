"""Separates the reasoning, the content and the tool calls of an answer that arrives in pieces.

Models that reason write ``<think>reasoning</think>answer``. Many of their chat templates end the
prompt with ``<think>``, so that the text begins inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from dsv3_jax.server.parsers.marker_reader import Markers, SpecialTokenFilter
from dsv3_jax.server.parsers.tool_parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
    ToolParser,
)
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


class AnswerParser:
    """Follows one answer: its reasoning, its tool calls if there are tools, and special tokens,
    which are left out. Without ``parallel`` calls the first one counts alone. If a grammar makes
    the answer consist of calls (``required``), an unfinished one at its end is left out."""

    def __init__(
        self,
        reasoning: ReasoningParser,
        tools: ToolParser | None = None,
        special_tokens: Sequence[str] = (),
        *,
        parallel: bool = True,
        required: bool = False,
    ):
        self._reasoning = reasoning
        self._tools = tools
        self._most_calls = None if parallel else 1
        self._required = required
        self._special_tokens = tuple(special_tokens)
        self._reasoning_filter = SpecialTokenFilter(self._special_tokens)
        self._content_filter: SpecialTokenFilter | None = None
        self.has_calls = False

    def add(self, text: str, *, is_last: bool = False) -> list[Event]:
        """Returns the parts of the next piece. Texts in them are not empty, except perhaps the last
        arguments of a call."""
        return list(self._parts(text, is_last))

    def _parts(self, text: str, is_last: bool) -> Iterator[Event]:
        parts = self._reasoning.add(text, is_last=is_last)
        reasoning = self._reasoning_filter.add(
            parts.reasoning, is_last=is_last or bool(parts.content)
        )
        if reasoning:
            yield Reasoning(reasoning)
        for event in self._answer(parts.content, is_last):
            match event:
                case Content():
                    if content := self._without_tokens(event.text):
                        yield Content(content)
                case CallBegin() | CallArguments():
                    if content := self._without_tokens("", is_last=True):
                        yield Content(content)
                    if self._most_calls is None or event.index < self._most_calls:
                        self.has_calls = True
                        yield event
                case Reasoning():
                    pass
        if is_last and (content := self._without_tokens("", is_last=True)):
            yield Content(content)

    def _answer(self, text: str, is_last: bool) -> list[Event]:
        """Returns the events of new text after the reasoning."""
        if self._tools is None:
            return [Content(text)] if text else []
        if not (is_last and self._required):
            return self._tools.add(text, is_last=is_last)
        events = self._tools.add(text)
        last = self._tools.add("", is_last=True)
        return events + [event for event in last if not isinstance(event, Content)]

    def _without_tokens(self, text: str, *, is_last: bool = False) -> str:
        if self._content_filter is None:
            # A call may have ended the reasoning before its tag.
            tag = (END,) if self._reasoning.is_unclosed else ()
            self._content_filter = SpecialTokenFilter((*self._special_tokens, *tag))
        return self._content_filter.add(text, is_last=is_last)

    def finish_reason(self, reason: str) -> str:
        """Returns the finish reason for clients, given that of the engine. It is ``tool_calls`` for
        answers whose calls are all at their end, and were not cut off by a stop string."""
        is_finished = self._tools is not None and self._tools.is_finished
        return "tool_calls" if self.has_calls and is_finished and reason == "stop" else reason
