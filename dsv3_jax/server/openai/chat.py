"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsv3_jax.generation.completion import Completion, Piece
from dsv3_jax.server.conversation import SubmittedConversation
from dsv3_jax.server.openai.answer import Answer
from dsv3_jax.server.openai.body import BodyRoute
from dsv3_jax.server.openai.chat_types import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatRequest,
    ChatResponse,
    DeltaChoice,
)
from dsv3_jax.server.openai.logprobs import chat_logprobs
from dsv3_jax.server.openai.sampling_fields import Usage
from dsv3_jax.server.openai.tool_types import AnsweredCall, AnsweredFunction
from dsv3_jax.server.parsers.tool_parser import CallArguments, CallBegin, Content, Event, Reasoning
from dsv3_jax.server.service import service_of
from dsv3_jax.server.sse import STREAMED, unless_gone

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
    """The answer to one request."""

    id_prefix = "chatcmpl-"

    def __init__(self, request: Request, body: ChatRequest, submitted: SubmittedConversation):
        super().__init__(request, body.model, submitted.job, n=body.n or 1)
        self._body = body
        self._parsers = submitted.parsers

    def body(self, completions: list[Completion]) -> ChatResponse:
        """Returns all answers."""
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
        events = parser.add(completion.text, is_last=True)
        content = "".join(event.text for event in events if isinstance(event, Content))
        reasoning = "".join(event.text for event in events if isinstance(event, Reasoning)) or None
        calls = calls_of(events)
        message = AnswerMessage(
            content=None if calls and not content else content,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=calls or None,
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


def calls_of(events: Sequence[Event]) -> list[AnsweredCall]:
    """Returns the tool calls of a whole answer."""
    calls = []
    for event in events:
        if isinstance(event, CallBegin):
            function = AnsweredFunction(name=event.name, arguments="")
            calls.append(AnsweredCall(id=event.id, function=function))
        elif isinstance(event, CallArguments):
            calls[event.index].function.arguments += event.text
    return calls
