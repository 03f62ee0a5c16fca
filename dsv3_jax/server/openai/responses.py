"""/v1/responses: answers made of items. The server stores none of them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsv3_jax.generation.completion import Completion
from dsv3_jax.server.conversation import SubmittedConversation
from dsv3_jax.server.errors import ApiError
from dsv3_jax.server.openai.answer import Answer
from dsv3_jax.server.openai.body import BodyRoute
from dsv3_jax.server.openai.logprobs import TextGrowth
from dsv3_jax.server.openai.response_input import Status
from dsv3_jax.server.openai.response_types import (
    AnyItem,
    FunctionCallItem,
    IncompleteDetails,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseBody,
    ResponsesRequest,
    ResponseUsage,
)
from dsv3_jax.server.openai.sampling_fields import Usage
from dsv3_jax.server.parsers.tool_parser import CallArguments, CallBegin, Content, Event, Reasoning
from dsv3_jax.server.service import service_of
from dsv3_jax.server.sse import STREAMED, NamedEventFormat, ResponseEvent, unless_gone


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
        self._sequence_number += 1
        return ResponseEvent(type=kind, sequence_number=self._sequence_number, **fields)

    def add(self, events: Sequence[Event]) -> Iterator[ResponseEvent]:
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


router = APIRouter(route_class=BodyRoute)


@router.post("/v1/responses", response_model=ResponseBody, responses=STREAMED)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answers a conversation. With ``stream``, returns named server-sent events."""
    service = service_of(request)
    service.check_model(body.model)
    submission = body.conversation().submit(
        service, n=1, prompt_field="input", grammar=body.grammar, **body.engine_settings()
    )
    submitted = await unless_gone(request, submission)
    return await _Answer(request, body, submitted).respond(stream=bool(body.stream))


class _Answer(Answer):
    id_prefix = "resp_"

    def __init__(self, request: Request, body: ResponsesRequest, submitted: SubmittedConversation):
        super().__init__(request, body.model, submitted.job)
        self._body = body
        self._submitted = submitted
        self._parser = submitted.parsers[0]
        self._stream = ItemStream()
        self.event_format = NamedEventFormat(self._error_event)

    def body(self, completions: list[Completion]) -> ResponseBody:
        (completion,) = completions
        for _ in self._stream.add(self._parser.add(completion.text, is_last=True)):
            pass
        for _ in self._stream.end(_status(completion)):
            pass
        return self._final(completion, self.usage(completions))

    async def events(self) -> AsyncGenerator[ResponseEvent, None]:
        stream, begun = self._stream, self._response("in_progress", None)
        yield stream.event("response.created", response=begun)
        yield stream.event("response.in_progress", response=begun)
        async for _, piece in self.job.pieces():
            is_last = piece.finish_reason is not None
            for event in stream.add(self._parser.add(piece.text, is_last=is_last)):
                yield event
        completion, usage = self.job.completion(0), self.final_usage()
        for event in stream.end(_status(completion)):
            yield event
        response = await self.service.in_thread(lambda: self._final(completion, usage), "answers")
        yield stream.event(f"response.{response.status}", response=response)

    def _final(self, completion: Completion, usage: Usage) -> ResponseBody:
        tokens = self._reasoning_tokens(completion)
        return self._response(_status(completion), ResponseUsage.of(usage, tokens))

    def _reasoning_tokens(self, completion: Completion) -> int:
        """Returns the number of generated tokens of the reasoning, without its markers."""
        if self._submitted.reasoning is None:
            return 0
        begin, end = self._submitted.reasoning.span(completion.text)
        shows_special = not self._submitted.skips_special_tokens
        growth = TextGrowth(self.tokenizer, shows_special=shows_special)
        count = 0
        for token in completion.tokens:
            if growth.length >= end:
                break
            is_text = begin <= growth.length
            count += growth.add(token) is not None and is_text
        return count

    def _response(self, status: Status, usage: ResponseUsage | None) -> ResponseBody:
        request = self._body
        tools = [tool.model_dump() for tool in request.tools or ()]
        form = request.text and request.text.format
        return ResponseBody(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.model,
            output=list(self._stream.items),
            usage=usage,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning={"effort": request.reasoning and request.reasoning.effort, "summary": None},
            temperature=1.0 if request.temperature is None else request.temperature,
            text={"format": {"type": "text"} if form is None else form.model_dump(by_alias=True)},
            tool_choice=request.tool_choice or "auto",
            tools=tools,
            top_p=1.0 if request.top_p is None else request.top_p,
            user=request.user,
        )

    def _error_event(self, error: ApiError) -> ResponseEvent:
        detail = error.body.error
        fields = {"code": detail.code or detail.type, "param": detail.param}
        return self._stream.event("error", message=detail.message, **fields)


def _status(completion: Completion) -> Status:
    return "incomplete" if completion.finish_reason == "length" else "completed"
