"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import AfterValidator, BaseModel, Field, model_validator
from starlette.responses import Response

from dsv3_jax.generation.completion import Completion, Piece
from dsv3_jax.generation.settings import MAX_TOP_LOGPROBS
from dsv3_jax.server.conversation import Conversation, SubmittedConversation
from dsv3_jax.server.openai.answer import Answer
from dsv3_jax.server.openai.body import AnswerPart, Body, BodyRoute, text_of, without_refused
from dsv3_jax.server.openai.logprobs import ChatLogprobs, chat_logprobs
from dsv3_jax.server.openai.sampling_fields import (
    SYSTEM_FINGERPRINT,
    ResponseFormat,
    SamplingFields,
    TemplateArguments,
    TextForm,
    Usage,
)
from dsv3_jax.server.openai.tool_types import (
    AnsweredCall,
    ToolCall,
    ToolChoice,
    Tools,
    tool_settings,
)
from dsv3_jax.server.parsers.tool_parser import CallArguments, CallBegin, Content, Event, Reasoning
from dsv3_jax.server.service import service_of
from dsv3_jax.server.sse import STREAMED, unless_gone

_REFUSED = {
    "functions": "its successor is tools",
    "function_call": "its successor is tool_choice",
    "audio": "the model writes text only",
    "prediction": "drafts come from the model; see dsv3 serve --draft",
}


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(AnswerPart):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the message as chat templates read it. They know no role ``developer``."""
        content = None if self.content is None else text_of(self.content)
        reasoning = self.reasoning_content or self.reasoning
        if content is None and not self.tool_calls:
            content = ""  # an answer that ended in its reasoning
        message = {
            "name": self.name,
            "reasoning_content": reasoning,
            "tool_calls": [call.model_dump(exclude={"index"}) for call in self.tool_calls or ()],
            "tool_call_id": self.tool_call_id,
        }
        present = {key: value for key, value in message.items() if value}
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content, **present}


def _check_messages(messages: list[Message]) -> list[Message]:
    for i, message in enumerate(messages):
        has_more = message.tool_calls or message.reasoning_content or message.reasoning
        if message.content is None and not (has_more and message.role == "assistant"):
            raise ValueError(f"messages.{i}.content: expected text, got none")
        if message.tool_calls and message.role != "assistant":
            raise ValueError(f"messages.{i}.tool_calls: expected none in a {message.role} message")
        if (message.role == "tool") != (message.tool_call_id is not None):
            expected = "the id of a tool call" if message.role == "tool" else "none"
            raise ValueError(
                f"messages.{i}.tool_call_id: expected {expected} in a {message.role} message, got"
                f" {message.tool_call_id!r:.80}"
            )
    return messages


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=4096, fail_fast=True),
    AfterValidator(_check_messages),
]


class ChatRequest(SamplingFields):
    """A request for the next message of a conversation."""

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    """Arguments of the chat template, such as ``{"thinking": true}``."""

    @model_validator(mode="before")
    @classmethod
    def _check_refused(cls, body: Any) -> Any:
        return without_refused(body, _REFUSED)

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: expected logprobs true with it, got false")
        if self.grammar is not None and self.tools and self.tool_choice != "none":
            raise ValueError(
                f"tools: expected none with {self.grammar.field}, which an answer with tool calls"
                " could not match; got both"
            )
        self._tool_settings()
        return self

    def text_forms(self) -> Mapping[str, TextForm | None]:
        """Returns the fields that describe the text, by their names."""
        return {**super().text_forms(), "response_format": self.response_format}

    def conversation(self) -> Conversation:
        return Conversation(
            messages=[message.for_template() for message in self.messages],
            arguments=self.chat_template_kwargs or {},
            **self._tool_settings(),
        )

    def _tool_settings(self) -> dict[str, Any]:
        return tool_settings(self.tool_choice, self.tools, self.parallel_tool_calls)

    def engine_settings(self) -> dict[str, Any]:
        """Returns the settings of :meth:`dsv3_jax.Engine.submit_all`. Without a limit of tokens, an
        answer can fill the context."""
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return {
            **super().engine_settings(),
            "max_new_tokens": most,
            "logprobs": self.top_logprobs or 0,
        }


class AnswerMessage(BaseModel):
    """The answer. Its reasoning has two names, because clients read one or the other."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    tool_calls: list[AnsweredCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatResponse(BaseModel):
    """Answers."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str = SYSTEM_FINGERPRINT
    choices: list[ChatChoice]
    usage: Usage


class DeltaChoice(BaseModel):
    """A piece of one answer."""

    index: int
    delta: dict[str, Any]
    """New text, by the names of the message's fields, which are left out without news."""
    logprobs: ChatLogprobs | None = None
    """Log-probabilities of the tokens since the piece before."""
    finish_reason: str | None = None


class ChatChunk(BaseModel):
    """A chunk of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str = SYSTEM_FINGERPRINT
    choices: list[DeltaChoice]
    usage: Usage | None = None


router = APIRouter(route_class=BodyRoute)


@router.post("/v1/chat/completions", response_model=ChatResponse, responses=STREAMED)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answers a conversation. With ``stream``, returns chunks as server-sent events."""
    service = service_of(request)
    service.check_model(body.model)
    transfer = body.kv_transfer_params
    submission = body.conversation().submit(
        service,
        n=body.n or 1,
        prompt_field="messages",
        grammar=body.grammar,
        peer=transfer and transfer.peer(service),
        **body.engine_settings(),
    )
    submitted = await unless_gone(request, submission)
    answer = _Answer(request, body, submitted)
    further = transfer and transfer.answer(request)
    return await answer.respond(stream=bool(body.stream), further=further)


class _Answer(Answer):
    id_prefix = "chatcmpl-"

    def __init__(self, request: Request, body: ChatRequest, submitted: SubmittedConversation):
        super().__init__(request, body.model, submitted.job, n=body.n or 1)
        self._body = body
        self._parsers = submitted.parsers

    def body(self, completions: list[Completion]) -> ChatResponse:
        return ChatResponse(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(i, completion) for i, completion in enumerate(completions)],
            usage=self.usage(completions),
        )

    async def events(self) -> AsyncGenerator[ChatChunk, None]:
        """Yields the chunks of a stream. The first of each answer has its role alone."""
        for i in range(len(self._parsers)):
            yield self._chunk([DeltaChoice(index=i, delta={"role": "assistant", "content": ""})])
        # Pieces without news, whose tokens belong to the next chunk.
        pending: list[list[Piece]] = [[] for _ in self._parsers]
        async for i, piece in self.job.pieces():
            is_last = piece.finish_reason is not None
            delta = _delta(self._parsers[i].add(piece.text, is_last=is_last))
            pending[i].append(piece)
            if delta or is_last:
                choice = DeltaChoice(index=i, delta=delta)
                if piece.finish_reason is not None:
                    choice.finish_reason = self._parsers[i].finish_reason(piece.finish_reason)
                if self._body.logprobs:
                    make = functools.partial(chat_logprobs, self.tokenizer, pending[i])
                    choice.logprobs = await self.service.in_thread(make, "answers")
                pending[i] = []
                yield self._chunk([choice])
        usage = self.final_usage()
        if self._body.includes_usage:
            yield self._chunk([], usage)

    def _chunk(self, choices: list[DeltaChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def _choice(self, index: int, completion: Completion) -> ChatChoice:
        parser = self._parsers[index]
        delta = _delta(parser.add(completion.text, is_last=True))
        calls = delta.get("tool_calls")
        message = AnswerMessage(
            content=delta.get("content", None if calls else ""),
            reasoning_content=delta.get("reasoning_content"),
            reasoning=delta.get("reasoning"),
            tool_calls=calls,
        )
        return ChatChoice(
            index=index,
            message=message,
            logprobs=chat_logprobs(self.tokenizer, [completion]) if self._body.logprobs else None,
            finish_reason=parser.finish_reason(completion.finish_reason),
        )


def _delta(events: Sequence[Event]) -> dict[str, Any]:
    """Returns news by the names of the message's fields. Each tool call has one entry at most,
    because clients add the first entries of a call as they are."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case Content():
                delta["content"] = delta.get("content", "") + event.text
            case Reasoning():
                for name in ("reasoning_content", "reasoning"):
                    delta[name] = delta.get(name, "") + event.text
            case CallBegin():
                function = {"name": event.name, "arguments": ""}
                call = {"id": event.id, "type": "function", "function": function}
                calls[event.index] = {"index": event.index, **call}
            case CallArguments():
                empty = {"index": event.index, "function": {"arguments": ""}}
                call = calls.setdefault(event.index, empty)
                call["function"]["arguments"] += event.text
    return delta | ({"tool_calls": list(calls.values())} if calls else {})
