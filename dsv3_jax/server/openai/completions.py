"""/v1/completions: text that continues prompts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Discriminator, Field, Tag, model_validator
from starlette.responses import Response

from dsv3_jax.generation.completion import Completion, Piece, TopLogprobs
from dsv3_jax.generation.request import Prompt
from dsv3_jax.generation.settings import MAX_TOP_LOGPROBS, Default
from dsv3_jax.server.job import Job
from dsv3_jax.server.openai.answer import Answer
from dsv3_jax.server.openai.body import BodyRoute
from dsv3_jax.server.openai.logprobs import CompletionLogprobs, TextGrowth, completion_logprobs
from dsv3_jax.server.openai.sampling_fields import SYSTEM_FINGERPRINT, SamplingFields, Usage
from dsv3_jax.server.service import service_of
from dsv3_jax.server.sse import STREAMED, unless_gone

MAX_PROMPTS = 1024
_DEFAULT_TOKENS = Default(16)  # OpenAI's

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_Count = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)

_REFUSED = {
    "best_of": "it samples more completions than it returns; use n",
    "suffix": "the model completes text at its end only",
}


def _kind(prompt: Any) -> str:
    """Returns the tag of a prompt's type, which its first element decides."""
    if isinstance(prompt, str):
        return "text"
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(first, str):
        return "texts"
    return "lists-of-ids" if isinstance(first, list) else "ids"


class CompletionRequest(SamplingFields):
    """A request for completions of text or token ids."""

    prompt: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[TokenIds, Tag("ids")]
        | Annotated[list[str], _Count, Tag("texts")]
        | Annotated[list[TokenIds], _Count, Tag("lists-of-ids")],
        Discriminator(_kind),
    ]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_refused(cls, body: Any) -> Any:
        if isinstance(body, dict):
            for name, reason in _REFUSED.items():
                if body.get(name) is not None:
                    raise ValueError(f"{name}: expected none, as it is not supported: {reason}")
        return body

    @model_validator(mode="after")
    def _check_combinations(self) -> CompletionRequest:
        if self.max_tokens == 0 and not (self.echo and not self.stream):
            raise ValueError("max_tokens: expected at least 1 without echo, or with stream; got 0")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts, each of them text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt[0], int):
            return [prompt]  # pyright: ignore[reportReturnType]
        return list(prompt)  # pyright: ignore[reportReturnType]

    def engine_settings(self) -> dict[str, Any]:
        """Returns the settings of :meth:`dsv3_jax.Engine.submit_all`."""
        settings = super().engine_settings()
        most = _DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        # An engine generates at least one token, which is dropped again.
        settings["max_new_tokens"] = most or 1
        if self.logprobs is not None:
            settings["logprobs"] = self.logprobs
            if self.echo:
                settings["prompt_logprobs"] = self.logprobs
        return settings


class CompletionChoice(BaseModel):
    """One completion, or a piece of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None


class CompletionResponse(BaseModel):
    """Completions, or a chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str = SYSTEM_FINGERPRINT
    choices: list[CompletionChoice]
    usage: Usage | None = None


router = APIRouter(route_class=BodyRoute)


@router.post("/v1/completions", response_model=CompletionResponse, responses=STREAMED)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Completes prompts. With ``stream``, returns chunks as server-sent events."""
    service = service_of(request)
    service.check_model(body.model)
    prompts = body.prompts
    transfer = body.kv_transfer_params
    submission = service.submit(
        lambda: prompts,
        len(prompts),
        n=body.n or 1,
        prompt_field="prompt",
        grammar=body.grammar,
        peer=transfer and transfer.peer(service),
        **body.engine_settings(),
    )
    job = await unless_gone(request, submission)
    answer = _Answer(request, body, prompts, job)
    further = transfer and transfer.answer(request)
    return await answer.respond(stream=bool(body.stream), further=further)


class _Answer(Answer):
    id_prefix = "cmpl-"

    def __init__(self, request: Request, body: CompletionRequest, prompts: list[Prompt], job: Job):
        super().__init__(request, body.model, job, n=body.n or 1)
        self._body = body
        self._prompts = prompts
        self._growths = [TextGrowth(self.tokenizer) for _ in job.handles]
        self._encoded: dict[int, list[int]] = {}  # by the prompt's number

    def body(self, completions: list[Completion]) -> CompletionResponse:
        completions = [self._requested_part(completion) for completion in completions]
        choices = [
            self._choice(i, completion, is_first=True) for i, completion in enumerate(completions)
        ]
        return self._chunk(choices, self.usage(completions))

    async def events(self) -> AsyncGenerator[CompletionResponse, None]:
        """Yields the chunks of a stream. The first of each completion has the prompt, if asked."""
        begun: set[int] = set()
        async for i, piece in self.job.pieces():
            make = functools.partial(self._choice, i, piece, is_first=i not in begun)
            begun.add(i)
            is_short = self._body.logprobs is None and not self._body.echo
            choice = make() if is_short else await self.service.in_thread(make, "answers")
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

    def _choice(self, index: int, part: Completion | Piece, *, is_first: bool) -> CompletionChoice:
        """Returns a completion or a piece of it. The prompt belongs to the first piece."""
        echo, text = is_first and bool(self._body.echo), part.text
        if echo:
            prompt = self._prompts[index // self.n]
            text = (prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)) + text
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs(index, part, echo=echo),
            finish_reason=part.finish_reason,
        )

    def _logprobs(
        self, index: int, part: Completion | Piece, *, echo: bool
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        tokens, logprobs = part.tokens, list[float | None](part.logprobs)
        tops = list[TopLogprobs | None](part.top_logprobs or [[] for _ in tokens])
        record, ends = self.job.handles[index].prompt_record, set[int]()
        if echo and record is not None:
            prompt = self._prompt_ids(index)
            # Prompt and answer are decoded apart, even if a character begins in one and ends in the
            # other.
            ends.add(len(prompt) - 1)
            tokens = [*prompt, *tokens]
            logprobs = [*record.logprobs, *logprobs]
            tops = [*record.top_logprobs, *tops]
        if part.finish_reason is not None:
            ends.add(len(tokens) - 1)
        return completion_logprobs(
            self.tokenizer, self._growths[index], tokens, logprobs, tops, ends
        )

    def _prompt_ids(self, index: int) -> list[int]:
        number = index // self.n
        if number not in self._encoded:  # once for all completions of a prompt
            prompt = self._prompts[number]
            is_text = isinstance(prompt, str)
            self._encoded[number] = self.tokenizer.encode(prompt) if is_text else list(prompt)
        return self._encoded[number]
