"""Separates the reasoning, the content and the tool calls of an answer that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsv3_jax.server.parsers.events import CallArguments, CallBegin, Content, Event, Reasoning
from dsv3_jax.server.parsers.reasoning import ReasoningParser
from dsv3_jax.server.parsers.special_tokens import SpecialTokenFilter
from dsv3_jax.server.parsers.tool_parser import ToolParser


class AnswerParser:
    """Follows one answer.

    Args:
      reasoning: parser of the reasoning.
      tools: parser of tool calls; None if there are no tools. Then the text contains no special
        tokens.
      special_tokens: texts of special tokens, which are left out after parsing.
      parallel: whether there may be several tool calls. Otherwise the first one counts alone.
    """

    def __init__(
        self,
        reasoning: ReasoningParser,
        tools: ToolParser | None = None,
        special_tokens: Sequence[str] = (),
        *,
        parallel: bool = True,
    ):
        self._reasoning = reasoning
        self._tools = tools
        self._most_calls = None if parallel else 1
        self._reasoning_filter = SpecialTokenFilter(special_tokens)
        self._content_filter = SpecialTokenFilter(special_tokens)
        self.has_calls = False
        """Whether there was a tool call."""

    def add(self, text: str, *, is_last: bool = False) -> list[Event]:
        """Returns the parts of the next piece. Texts in them are not empty."""
        return list(self._parts(text, is_last))

    def _parts(self, text: str, is_last: bool) -> Iterator[Event]:
        parts = self._reasoning.add(text, is_last=is_last)
        reasoning = self._reasoning_filter.add(
            parts.reasoning, is_last=is_last or bool(parts.content)
        )
        if reasoning:
            yield Reasoning(reasoning)
        if self._tools is None:
            events: list[Event] = [Content(parts.content)] if parts.content else []
        else:
            events = self._tools.add(parts.content, is_last=is_last)
        for event in events:
            match event:
                case Content():
                    if content := self._content_filter.add(event.text):
                        yield Content(content)
                case CallBegin() | CallArguments():
                    if content := self._content_filter.add("", is_last=True):
                        yield Content(content)
                    if self._most_calls is None or event.index < self._most_calls:
                        self.has_calls = True
                        yield event
        if is_last and (content := self._content_filter.add("", is_last=True)):
            yield Content(content)

    def finish_reason(self, reason: str) -> str:
        """Returns the finish reason for clients, given that of the engine."""
        return "tool_calls" if self.has_calls and reason == "stop" else reason
