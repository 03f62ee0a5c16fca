"""The blocks of an answer, made of the events of its parser."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsv3_jax.server.anthropic.answer_types import (
    AnyContent,
    BlockDelta,
    BlockStart,
    BlockStop,
    TextContent,
    ThinkingContent,
    ToolUseContent,
)
from dsv3_jax.server.conversation import json_object
from dsv3_jax.server.parsers.events import CallArguments, CallBegin, Content, Event, Reasoning
from dsv3_jax.server.sse import NamedEvent


class BlockStream:
    """Turns events into the blocks of a stream, one after the other."""

    def __init__(self) -> None:
        self._index = -1
        self._open: AnyContent | None = None

    def add(self, events: Sequence[Event]) -> Iterator[NamedEvent]:
        """Yields the stream's events."""
        for event in events:
            match event:
                case Content(text):
                    yield from self._begin(TextContent())
                    delta = {"type": "text_delta", "text": text}
                case Reasoning(text):
                    yield from self._begin(ThinkingContent())
                    delta = {"type": "thinking_delta", "thinking": text}
                case CallBegin(_, call_id, name):
                    yield from self._begin(ToolUseContent(id=call_id, name=name))
                    continue
                case CallArguments(_, text):
                    delta = {"type": "input_json_delta", "partial_json": text}
            yield BlockDelta(index=self._index, delta=delta)

    def _begin(self, block: AnyContent) -> Iterator[NamedEvent]:
        """Begins a block, unless text of the same kind goes on."""
        if type(block) is type(self._open) and not isinstance(block, ToolUseContent):
            return
        yield from self.end()
        self._index += 1
        self._open = block
        yield BlockStart(index=self._index, content_block=block)

    def end(self) -> Iterator[NamedEvent]:
        """Ends the last block."""
        if self._open is not None:
            yield BlockStop(index=self._index)
            self._open = None


def blocks_of(events: Sequence[Event]) -> list[AnyContent]:
    """Returns the blocks of a whole answer. The input of a call is an object, as clients expect it:
    arguments that are none become its field ``INVALID_JSON``, as Anthropic recommends."""
    blocks: list[AnyContent] = []
    arguments: list[str] = []
    for event in BlockStream().add(events):
        if isinstance(event, BlockStart):
            blocks.append(event.content_block)
            arguments.append("")
        elif isinstance(event, BlockDelta):
            block, delta = blocks[event.index], event.delta
            if isinstance(block, TextContent):
                block.text += delta["text"]
            elif isinstance(block, ThinkingContent):
                block.thinking += delta["thinking"]
            else:
                arguments[event.index] += delta["partial_json"]
    for block, text in zip(blocks, arguments, strict=True):
        if isinstance(block, ToolUseContent):
            value = json_object(text)
            block.input = {"INVALID_JSON": text} if value is None else value
    return blocks
