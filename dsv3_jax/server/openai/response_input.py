"""The input of /v1/responses: items, and how they become messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from dsv3_jax.server.openai.body import Body, Json
from dsv3_jax.server.openai.tool_types import FunctionName

Status = Literal["in_progress", "completed", "incomplete"]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class InputText(Body):
    """Text of a message. That of earlier answers has further fields, which are ignored."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Json] | None = None
    logprobs: list[Json] | None = None


class InputMessage(Body):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Field(fail_fast=True)]
    id: str | None = None
    status: Status | None = None
    phase: str | None = None
    """Accepted and ignored."""


class FunctionCallInput(Body):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(Body):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: str | Annotated[list[InputText], Field(fail_fast=True)]
    id: str | None = None
    status: Status | None = None


class ReasoningText(Body):
    """Text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningInput(Body):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    summary: list[Json] | None = None
    """Accepted and ignored."""
    encrypted_content: str | None = None
    """Accepted and ignored."""
    id: str | None = None
    status: Status | None = None


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else kind if isinstance(kind, str) else ""


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallInput, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningInput, Tag("reasoning")],
    Discriminator(_kind),
]


def messages_of(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Returns items as messages that chat templates read.

    Reasoning, text and tool calls that follow each other are one message of the assistant.
    """
    messages: list[dict[str, Any]] = []
    reasoning = ""

    def assistant(content: str | None) -> dict[str, Any]:
        nonlocal reasoning
        thoughts = {"reasoning_content": reasoning} if reasoning else {}
        reasoning = ""
        return {"role": "assistant", "content": content, **thoughts}

    for item in items:
        match item:
            case InputMessage(role="assistant"):
                messages.append(assistant(_text(item.content)))
            case InputMessage():
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": _text(item.content)})
            case ReasoningInput():
                reasoning = "".join(part.text for part in item.content or ())
            case FunctionCallOutput():
                output = _text(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            case FunctionCallInput():
                if not messages or messages[-1]["role"] != "assistant" or reasoning:
                    messages.append(assistant(None))
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def _text(content: str | Sequence[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
