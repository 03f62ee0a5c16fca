"""Separates the reasoning, the content and the tool calls of an answer that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsv3_jax.server.parsers.marker_reader import SpecialTokenFilter
from dsv3_jax.server.parsers.reasoning import END, ReasoningParser
from dsv3_jax.server.parsers.tool_parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
    ToolParser,
)


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
