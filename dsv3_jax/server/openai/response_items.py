"""The output of /v1/responses: items, and the events of a stream that builds them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel, JsonValue

from dsv3_jax.server.parsers.tool_parser import CallArguments, CallBegin, Content, Event, Reasoning
from dsv3_jax.server.sse import NamedEvent

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """Text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[JsonValue] = []
    logprobs: list[JsonValue] = []


class ReasoningText(BaseModel):
    """Text of the reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class Item(BaseModel):
    """Base class of all items."""

    id: str
    status: Status = "in_progress"


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(Item):
    """The reasoning. It is no summary."""

    type: Literal["reasoning"] = "reasoning"
    summary: list[JsonValue] = []
    content: list[ReasoningText] = []


class FunctionCallItem(Item):
    """A tool call."""

    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str = ""


AnyItem = MessageItem | ReasoningItem | FunctionCallItem


class ResponseEvent(NamedEvent):
    """An event of a stream."""

    sequence_number: int


class ItemStream:
    """Builds the items of an answer, and the events that announce them."""

    def __init__(self) -> None:
        self.items: list[AnyItem] = []
        """All items. The last one has its text when it has ended."""
        self._texts: list[str] = []  # of the last item
        self._is_open = False
        self._is_cut = False  # the call that is open
        self._sequence_number = -1

    def event(self, kind: str, **fields: Any) -> ResponseEvent:
        """Returns the next event."""
        self._sequence_number += 1
        return ResponseEvent(type=kind, sequence_number=self._sequence_number, **fields)

    def add(self, events: Sequence[Event]) -> Iterator[ResponseEvent]:
        """Yields the events for new parts of the answer."""
        for event in events:
            match event:
                case Content(text):
                    if not self._is_open or not isinstance(self.items[-1], MessageItem):
                        yield from self._begin(MessageItem(id=_id("msg_")))
                    yield self._add_text("response.output_text.delta", text, logprobs=[])
                case Reasoning(text):
                    if not self._is_open or not isinstance(self.items[-1], ReasoningItem):
                        yield from self._begin(ReasoningItem(id=_id("rs_")))
                    yield self._add_text("response.reasoning_text.delta", text)
                case CallBegin(_, call_id, name):
                    item = FunctionCallItem(id=_id("fc_"), call_id=call_id, name=name)
                    yield from self._begin(item)
                case CallArguments(_, text, is_last):
                    item = self.items[-1]
                    assert isinstance(item, FunctionCallItem)
                    self._texts.append(text)
                    self._is_cut = not is_last
                    yield self._item_event("response.function_call_arguments.delta", delta=text)

    def end(self, status: Status = "completed") -> Iterator[ResponseEvent]:
        """Ends the last item. A call whose arguments have not ended is incomplete."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item.status = status
        if isinstance(item, FunctionCallItem):
            item.status = "incomplete" if self._is_cut else status
            item.arguments = "".join(self._texts)
            fields = {"name": item.name, "arguments": item.arguments}
            yield self._item_event("response.function_call_arguments.done", **fields)
        else:
            part = item.content[0]
            part.text = "".join(self._texts)
            logprobs = {"logprobs": []} if isinstance(part, OutputText) else {}
            yield self._part_event(f"response.{part.type}.done", text=part.text, **logprobs)
            yield self._part_event("response.content_part.done", part=part.model_copy())
        yield self._output_event("response.output_item.done")

    def _begin(self, item: AnyItem) -> Iterator[ResponseEvent]:
        yield from self.end()
        self.items.append(item)
        self._is_open = self._is_cut = True
        self._texts = []
        yield self._output_event("response.output_item.added")
        if not isinstance(item, FunctionCallItem):
            part = OutputText() if isinstance(item, MessageItem) else ReasoningText()
            item.content = [part]  # pyright: ignore[reportAttributeAccessIssue]
            yield self._part_event("response.content_part.added", part=part.model_copy())

    def _add_text(self, kind: str, text: str, **fields: Any) -> ResponseEvent:
        self._texts.append(text)
        return self._part_event(kind, delta=text, **fields)

    def _output_event(self, kind: str) -> ResponseEvent:
        item = self.items[-1].model_copy(deep=True)
        return self.event(kind, output_index=len(self.items) - 1, item=item)

    def _item_event(self, kind: str, **fields: Any) -> ResponseEvent:
        index = len(self.items) - 1
        return self.event(kind, item_id=self.items[-1].id, output_index=index, **fields)

    def _part_event(self, kind: str, **fields: Any) -> ResponseEvent:
        return self._item_event(kind, content_index=0, **fields)


def _id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex
