"""/v1/chat/completions: the next message of a conversation."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsv3_jax.generation.completion import Completion, Piece
from dsv3_jax.generation.request import Prompt
from dsv3_jax.server.job import Job
from dsv3_jax.server.openai.answer import Answer
from dsv3_jax.server.openai.chat_types import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatRequest,
    ChatResponse,
    DeltaChoice,
    encode_chat,
)
from dsv3_jax.server.openai.sampling_fields import Usage
from dsv3_jax.server.openai.token_text import chat_logprobs
from dsv3_jax.server.parsers.reasoning import Parts, ReasoningParser
from dsv3_jax.server.service import Service, service_of

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatResponse)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answers a conversation. With ``stream``, returns chunks as server-sent events."""
    service = service_of(request)
    service.check_model(body.model)
    prompt: list[int] = []

    def read_prompt() -> list[Prompt]:
        prompt.extend(encode_chat(service.tokenizer, body.messages, body.chat_template_kwargs))
        return [prompt]

    job = await service.submit(
        read_prompt, 1, n=body.n or 1, prompt_field="messages", **body.engine_settings()
    )
    answer = _Answer(body, prompt, job, service, request.state.log)
    return await answer.respond(request, stream=bool(body.stream))


class _Answer(Answer):
    """The answer to one request.

    Args:
      prompt: ids of the conversation.
    """

    def __init__(
        self,
        body: ChatRequest,
        prompt: Sequence[int],
        job: Job,
        service: Service,
        log: dict[str, object],
    ):
        super().__init__("chatcmpl-", body.model, job, service, n=body.n or 1, log=log)
        self._body = body
        self._parsers = [ReasoningParser.of_prompt(service.tokenizer, prompt) for _ in job.handles]

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
            parts = self._parsers[i].add(piece.text, is_last=is_last)
            delta = _delta(parts)
            pending[i].append(piece)
            if delta or is_last:
                choice = DeltaChoice(index=i, delta=delta, finish_reason=piece.finish_reason)
                if self._body.logprobs:
                    make = functools.partial(chat_logprobs, self.tokenizer, pending[i])
                    choice.logprobs = await self.service.in_thread(make)
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
        parts = self._parsers[index].add(completion.text, is_last=True)
        message = AnswerMessage(
            content=parts.content,
            reasoning_content=parts.reasoning or None,
            reasoning=parts.reasoning or None,
        )
        return ChatChoice(
            index=index,
            message=message,
            logprobs=chat_logprobs(self.tokenizer, [completion]) if self._body.logprobs else None,
            finish_reason=completion.finish_reason,
        )


def _delta(parts: Parts) -> dict[str, str]:
    """Returns new text by the names of the message's fields."""
    delta = {"content": parts.content} if parts.content else {}
    if parts.reasoning:
        delta |= {"reasoning_content": parts.reasoning, "reasoning": parts.reasoning}
    return delta
