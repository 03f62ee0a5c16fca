"""Bodies of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from dsv3_jax.generation.request import Prompt
from dsv3_jax.generation.settings import MAX_TOP_LOGPROBS, Default
from dsv3_jax.server.openai.sampling_fields import SYSTEM_FINGERPRINT, SamplingFields, Usage

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


class CompletionLogprobs(BaseModel):
    """Log-probabilities, with one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Characters of the text before each token. Special tokens that it leaves out do not count."""


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
