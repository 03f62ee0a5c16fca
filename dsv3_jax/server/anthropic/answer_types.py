"""Bodies of answers of /v1/messages, and events of its streams."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, JsonValue

from dsv3_jax.server.errors import MessagesErrorDetail
from dsv3_jax.server.openai.sampling_fields import Usage
from dsv3_jax.server.sse import NamedEvent

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesUsage(BaseModel):
    """Numbers of tokens. Those of the prompt that were found in the cache count apart."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> MessagesUsage:
        """Returns the usage in the shape of this API."""
        cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )


class TextContent(BaseModel):
    """Text of an answer."""

    type: Literal["text"] = "text"
    text: str = ""
    citations: None = None


class ThinkingContent(BaseModel):
    """Reasoning of an answer."""

    type: Literal["thinking"] = "thinking"
    thinking: str = ""
    signature: str = ""


class ToolUseContent(BaseModel):
    """A tool call of an answer."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, JsonValue] = {}


AnyContent = TextContent | ThinkingContent | ToolUseContent


class MessageAnswer(BaseModel):
    """An answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnyContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(BaseModel):
    """Number of tokens of a conversation."""

    input_tokens: int


class MessageStart(NamedEvent):
    """Beginning of an answer."""

    type: str = "message_start"
    message: MessageAnswer


class BlockStart(NamedEvent):
    """Beginning of a block."""

    type: str = "content_block_start"
    index: int
    content_block: AnyContent


class BlockDelta(NamedEvent):
    """News of a block."""

    type: str = "content_block_delta"
    index: int
    delta: dict[str, str]


class BlockStop(NamedEvent):
    """End of a block."""

    type: str = "content_block_stop"
    index: int


class MessageDelta(NamedEvent):
    """End of the content."""

    type: str = "message_delta"
    delta: dict[str, Any]
    usage: MessagesUsage


class MessageStop(NamedEvent):
    """End of the stream."""

    type: str = "message_stop"


class ErrorEvent(NamedEvent):
    """An error after the beginning of a stream."""

    type: str = "error"
    error: MessagesErrorDetail
