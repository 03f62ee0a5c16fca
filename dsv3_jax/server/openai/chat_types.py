"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from dsv3_jax.generation.settings import MAX_TOP_LOGPROBS
from dsv3_jax.server.conversation import Conversation
from dsv3_jax.server.openai.body import AnswerPart, Body, Json, at_most, without_refused
from dsv3_jax.server.openai.logprobs import ChatLogprobs
from dsv3_jax.server.openai.sampling_fields import SYSTEM_FINGERPRINT, SamplingFields, Usage
from dsv3_jax.server.openai.structure_types import ResponseFormat, TextForm
from dsv3_jax.server.openai.tool_types import (
    AnsweredCall,
    ToolCall,
    ToolChoice,
    Tools,
    allows_parallel_calls,
    described_tools,
    required_tools,
)

_REFUSED = {
    "functions": "its successor is tools",
    "function_call": "its successor is tool_choice",
    "audio": "the model writes text only",
    "prediction": "drafts come from the model; see dsv3 serve --draft",
}


# Arguments of Tokenizer.chat, and tools, which are a field. With split_special_tokens, text could
# become control tokens.
_RESERVED = frozenset(
    ("self", "messages", "add_generation_prompt", "split_special_tokens", "tools")
)


def _check_arguments(arguments: dict[str, Json]) -> dict[str, Json]:
    for name in arguments:
        if name in _RESERVED:
            raise ValueError(f"chat_template_kwargs: expected no {name!r}, which is reserved")
    return arguments


TemplateArguments = Annotated[
    dict[str, Json], Field(max_length=32), at_most(32), AfterValidator(_check_arguments)
]


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
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
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
        required_tools(self.tool_choice, described_tools(self.tool_choice, self.tools))
        return self

    def text_forms(self) -> Mapping[str, TextForm | None]:
        """Returns the fields that describe the text, by their names."""
        return {**super().text_forms(), "response_format": self.response_format}

    def conversation(self) -> Conversation:
        """Returns the conversation."""
        tools = described_tools(self.tool_choice, self.tools)
        return Conversation(
            messages=[message.for_template() for message in self.messages],
            tools=tools,
            required_tools=required_tools(self.tool_choice, tools),
            parallel_calls=allows_parallel_calls(self.tool_choice, self.parallel_tool_calls),
            arguments=self.chat_template_kwargs or {},
        )

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
