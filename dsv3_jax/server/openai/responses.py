"""/v1/responses: answers made of items. The server stores none of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsv3_jax.generation.completion import Completion
from dsv3_jax.server.conversation import SubmittedConversation
from dsv3_jax.server.errors import ApiError
from dsv3_jax.server.openai.answer import Answer
from dsv3_jax.server.openai.body import BodyRoute
from dsv3_jax.server.openai.logprobs import TextGrowth
from dsv3_jax.server.openai.response_items import ItemStream, ResponseEvent, Status
from dsv3_jax.server.openai.response_types import (
    IncompleteDetails,
    ResponseBody,
    ResponsesRequest,
    ResponseUsage,
)
from dsv3_jax.server.openai.sampling_fields import Usage
from dsv3_jax.server.service import service_of
from dsv3_jax.server.sse import STREAMED, NamedEventFormat, unless_gone

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
    """The answer to one request."""

    id_prefix = "resp_"

    def __init__(self, request: Request, body: ResponsesRequest, submitted: SubmittedConversation):
        super().__init__(request, body.model, submitted.job)
        self._body = body
        self._submitted = submitted
        self._parser = submitted.parsers[0]
        self._stream = ItemStream()
        self.event_format = NamedEventFormat(self._error_event)

    def body(self, completions: list[Completion]) -> ResponseBody:
        """Returns the answer."""
        (completion,) = completions
        for _ in self._stream.add(self._parser.add(completion.text, is_last=True)):
            pass
        for _ in self._stream.end(_status(completion)):
            pass
        return self._final(completion, self.usage(completions))

    async def events(self) -> AsyncGenerator[ResponseEvent, None]:
        """Yields the events of a stream."""
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
