"""/v1/completions: text that continues prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsv3_jax.generation.completion import Completion
from dsv3_jax.generation.request import Prompt
from dsv3_jax.server.job import Job
from dsv3_jax.server.openai.answer import Answer
from dsv3_jax.server.openai.completion_types import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from dsv3_jax.server.openai.sampling_fields import Usage
from dsv3_jax.server.openai.token_text import completion_logprobs
from dsv3_jax.server.service import Service, service_of

router = APIRouter()


@router.post("/v1/completions", response_model=CompletionResponse)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Completes prompts. With ``stream``, returns chunks as server-sent events."""
    service = service_of(request)
    service.check_model(body.model)
    prompts = body.prompts
    job = await service.submit(
        lambda: prompts,
        len(prompts),
        n=body.n or 1,
        prompt_field="prompt",
        **body.engine_settings(),
    )
    answer = _Answer(body, prompts, job, service, request.state.log)
    return await answer.respond(request, stream=bool(body.stream))


class _Answer(Answer):
    """The answer to one request."""

    def __init__(
        self,
        body: CompletionRequest,
        prompts: list[Prompt],
        job: Job,
        service: Service,
        log: dict[str, object],
    ):
        super().__init__("cmpl-", body.model, job, service, n=body.n or 1, log=log)
        self._body = body
        self._prompts = prompts

    def body(self, completions: list[Completion]) -> CompletionResponse:
        """Returns all completions."""
        completions = [self._requested_part(completion) for completion in completions]
        choices = [self._choice(i, completion) for i, completion in enumerate(completions)]
        return self._chunk(choices, self.usage(completions))

    async def events(self) -> AsyncGenerator[CompletionResponse, None]:
        """Yields the chunks of a stream."""
        if self._body.echo:
            for i in range(len(self.job.handles)):
                text = self._prompt_text(i)
                yield self._chunk([CompletionChoice(index=i, text=text, finish_reason=None)])
        async for i, piece in self.job.pieces():
            choice = CompletionChoice(index=i, text=piece.text, finish_reason=piece.finish_reason)
            yield self._chunk([choice])
        usage = self.final_usage()
        if self._body.includes_usage:
            yield self._chunk([], usage)

    def _chunk(
        self, choices: list[CompletionChoice], usage: Usage | None = None
    ) -> CompletionResponse:
        return CompletionResponse(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def _requested_part(self, completion: Completion) -> Completion:
        """Returns the part of a completion that was asked for."""
        if self._body.max_tokens != 0:
            return completion
        return dataclasses.replace(
            completion, text="", tokens=[], logprobs=[], top_logprobs=[], finish_reason="length"
        )

    def _choice(self, index: int, completion: Completion) -> CompletionChoice:
        text = completion.text
        if self._body.echo:
            text = self._prompt_text(index) + text
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(index, completion),
            finish_reason=completion.finish_reason,
        )

    def _logprobs(self, index: int, completion: Completion) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        tokens, logprobs = completion.tokens, list[float | None](completion.logprobs)
        tops = list(completion.top_logprobs or [[] for _ in tokens])
        if self._body.echo:
            assert completion.prompt_logprobs is not None
            tokens = [*self._prompt_ids(index), *tokens]
            logprobs = [*completion.prompt_logprobs, *logprobs]
            tops = [*(completion.prompt_top_logprobs or []), *tops]
        return completion_logprobs(self.tokenizer, tokens, logprobs, tops)

    def _prompt_ids(self, index: int) -> list[int]:
        prompt = self._prompts[index // self.n]
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompts[index // self.n]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
