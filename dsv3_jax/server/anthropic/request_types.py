"""Bodies of requests to /v1/messages, and how they become conversations."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from dsv3_jax.server.conversation import Conversation
from dsv3_jax.server.openai.body import AnswerPart, Body, Json, text_of
from dsv3_jax.server.openai.sampling_fields import StopStrings, TemplateArguments
from dsv3_jax.server.openai.tool_types import CallId, FunctionName, NamedTool, tool_settings


class CacheControl(Body):
    """Accepted and ignored: the server caches all prefixes."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class Block(AnswerPart):
    """A part of a message."""

    cache_control: CacheControl | None = None


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: None = None


class ThinkingBlock(Block):
    """Reasoning of an earlier answer. Its signature is ignored."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Block):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: CallId
    name: FunctionName
    input: dict[str, Json]


class ToolResultBlock(Block):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)] = ""
    is_error: bool | None = None
    """Accepted and ignored: chat formats have no such field. The content tells."""


AnyBlock = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class InputMessage(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[AnyBlock], Field(max_length=4096, fail_fast=True)]

    def for_template(self) -> Iterator[dict[str, Any]]:
        """Yields the message as chat templates read it: results of tools in messages of their
        own."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
        elif self.role == "user":
            yield from self._user_messages(self.content)
        else:
            yield self._assistant_message(self.content)

    def _user_messages(self, blocks: Sequence[AnyBlock]) -> Iterator[dict[str, Any]]:
        text: list[str] = []
        for block in blocks:
            if isinstance(block, ToolResultBlock):
                if text:
                    yield {"role": "user", "content": "".join(text)}
                    text = []
                content = text_of(block.content)
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            elif isinstance(block, TextBlock):
                text.append(block.text)
        if text:
            yield {"role": "user", "content": "".join(text)}

    def _assistant_message(self, blocks: Sequence[AnyBlock]) -> dict[str, Any]:
        content = "".join(block.text for block in blocks if isinstance(block, TextBlock))
        reasoning = "".join(b.thinking for b in blocks if isinstance(b, ThinkingBlock))
        calls = [
            {
                "id": block.id,
                "type": "function",
                "function": {
                    "name": block.name,
                    "arguments": json.dumps(block.input, ensure_ascii=False),
                },
            }
            for block in blocks
            if isinstance(block, ToolUseBlock)
        ]
        further = {"reasoning_content": reasoning, "tool_calls": calls}
        present = {name: value for name, value in further.items() if value}
        return {"role": "assistant", "content": content or (None if calls else ""), **present}


def _check_messages(messages: list[InputMessage]) -> list[InputMessage]:
    kinds = {
        "user": (TextBlock, ToolResultBlock),
        "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    }
    for i, message in enumerate(messages):
        blocks = [] if isinstance(message.content, str) else message.content
        for j, block in enumerate(blocks):
            if not isinstance(block, kinds[message.role]):
                raise ValueError(
                    f"messages.{i}.content.{j}.type: expected no {block.type} in a message of the"
                    f" {message.role}"
                )
    if messages[-1].role != "user":
        raise ValueError(
            "messages: expected the last one to be the user's; the beginning of an answer cannot be"
            " given"
        )
    return messages


class MessagesTool(Body):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Json]
    cache_control: CacheControl | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the tool as chat templates read it."""
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(Body):
    """Whether the model may call tools, has to call one, or has to call the one with a name."""

    type: Literal["auto", "none", "any", "tool"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the answer begins with reasoning, if the chat template leaves the choice."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """Accepted and ignored: only max_tokens limits the reasoning."""
    display: Literal["summarized", "omitted"] | None = None
    """Accepted and ignored."""


class Metadata(Body):
    """Accepted and ignored."""

    user_id: str | None = None


class CountRequest(Body):
    """A conversation whose tokens are to be counted."""

    model: str
    messages: Annotated[
        list[InputMessage],
        Field(min_length=1, max_length=4096, fail_fast=True),
        AfterValidator(_check_messages),
    ]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateArguments | None = None

    @model_validator(mode="after")
    def _check_choice(self) -> CountRequest:
        self._tool_settings()
        return self

    def _tool_settings(self) -> dict[str, Any]:
        choice = self.tool_choice or ToolChoice(type="auto")
        named = NamedTool(type="function", name=choice.name)
        by_type = {"none": "none", "auto": "auto", "any": "required", "tool": named}  # OpenAI's
        parallel = not choice.disable_parallel_tool_use
        return tool_settings(by_type[choice.type], self.tools, parallel)

    def conversation(self) -> Conversation:
        system = text_of(self.system or "")
        messages = [{"role": "system", "content": system}] if system else []
        for message in _turns(self.messages):
            messages += message.for_template()
        thinking = None if self.thinking is None else self.thinking.type != "disabled"
        return Conversation(
            messages=messages,
            thinking=thinking,
            arguments=self.chat_template_kwargs or {},
            **self._tool_settings(),
        )


class MessagesRequest(CountRequest):
    """A request for the next message of a conversation."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    cache_control: CacheControl | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None

    def engine_settings(self) -> dict[str, Any]:
        """Returns the settings of :meth:`dsv3_jax.Engine.submit_all`."""
        settings = {
            "max_new_tokens": self.max_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
        }
        return {name: value for name, value in settings.items() if value is not None}


def _turns(messages: Sequence[InputMessage]) -> Iterator[InputMessage]:
    """Yields messages. Those of the assistant that follow each other become one, as in Anthropic's
    API, so that the results of tools follow all calls."""
    for role, group in itertools.groupby(messages, key=lambda message: message.role):
        if role == "user":
            yield from group
            continue
        blocks: list[AnyBlock] = []
        for message in group:
            content = message.content
            blocks += (
                [TextBlock(type="text", text=content)] if isinstance(content, str) else content
            )
        yield InputMessage.model_construct(role=role, content=blocks)
