"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, JsonValue, model_validator

from dsv3_jax.generation.settings import MAX_TOP_LOGPROBS
from dsv3_jax.server.openai.sampling_fields import SYSTEM_FINGERPRINT, Body, SamplingFields, Usage
from dsv3_jax.tokenizer import Tokenizer

_REFUSED = {
    "tools": "tools are not supported yet",
    "functions": "tools are not supported yet",
    "function_call": "tools are not supported yet",
    "audio": "the model writes text only",
    "prediction": "drafts come from the model; see dsv3 serve --draft",
}


# Arguments of Tokenizer.chat. With split_special_tokens, text could become control tokens.
_RESERVED = frozenset(("self", "messages", "add_generation_prompt", "split_special_tokens"))


def _check_arguments(arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
    for name in arguments:
        if name in _RESERVED:
            raise ValueError(f"chat_template_kwargs: expected no {name!r}, which is reserved")
    return arguments


TemplateArguments = Annotated[
    dict[str, JsonValue], Field(max_length=32), AfterValidator(_check_arguments)
]


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the message as chat templates read it. They know no role ``developer``."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
            "name": self.name,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        return {key: value for key, value in message.items() if value is not None}


class ResponseFormat(Body):
    """The form of an answer."""

    type: Literal["text"]


class ChatRequest(SamplingFields):
    """A request for the next message of a conversation."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    """Arguments of the chat template, such as ``{"thinking": true}``."""

    @model_validator(mode="before")
    @classmethod
    def _check_refused(cls, body: Any) -> Any:
        if isinstance(body, dict):
            for name, reason in _REFUSED.items():
                if body.get(name):
                    raise ValueError(f"{name}: expected none: {reason}")
            return {name: value for name, value in body.items() if name not in _REFUSED}
        return body

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: expected logprobs true with it, got false")
        return self

    def engine_settings(self) -> dict[str, Any]:
        """Returns the settings of :meth:`dsv3_jax.Engine.submit_all`. Without a limit of tokens, an
        answer can fill the context."""
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return {
            **super().engine_settings(),
            "max_new_tokens": most,
            "logprobs": self.top_logprobs or 0,
        }


class TokenLogprob(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None
    """Its bytes in UTF-8. None for a token that is no whole character."""


class ChosenLogprob(TokenLogprob):
    """A token of the answer."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer's tokens, those of its reasoning and end included."""

    content: list[ChosenLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    """The answer. Its reasoning has two names, because clients read one or the other."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None


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
    delta: dict[str, str]
    """New text, by the names of the message's fields, which are left out without news."""
    logprobs: ChatLogprobs | None = None
    """Of the tokens since the piece before it."""
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


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    arguments: dict[str, Any] | None,
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Returns the ids of a conversation. Text never becomes a control token.

    Args:
      arguments: of the chat template.

    Raises:
      ValueError: there is no template, or it refuses the messages.
    """
    return tokenizer.chat(
        [message.for_template() for message in messages],
        add_generation_prompt=add_generation_prompt,
        **(arguments or {}),
    )
