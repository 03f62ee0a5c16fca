"""The input of /v1/responses: items, and how they become messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from dsv3_jax.server.openai.body import AnswerPart, Body, Json, text_of
from dsv3_jax.server.openai.tool_types import CallId, FunctionName

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(AnswerPart):
    """Text of a message. That of earlier answers has further fields, which are ignored."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Json] | None = None
    logprobs: list[Json] | None = None


class InputMessage(AnswerPart):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Field(fail_fast=True)]
    id: str | None = None
    status: Status | None = None
    phase: str | None = None  # accepted and ignored


class FunctionCallInput(AnswerPart):
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


class ReasoningText(AnswerPart):
    """Text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningInput(AnswerPart):
    """The reasoning of an earlier answer."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    summary: list[Json] | None = None  # accepted and ignored
    encrypted_content: str | None = None  # accepted and ignored
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

    Reasoning, text and tool calls that follow each other are one message of the assistant, and the
    results of its calls follow it, wherever they are in the input. Reasoning or a message begins
    another one after text without calls. Reasoning without text or calls is a message too, except
    at the end of the input, where it is left out: the answer is written anew.
    """
    groups: list[list[dict[str, Any]]] = []  # a message, with the results of its calls
    group_of: dict[str, list[dict[str, Any]]] = {}  # by the ids of calls
    answer: list[dict[str, Any]] | None = None  # the group of the answer that may go on

    def going_on(*, with_calls: bool = False) -> dict[str, Any]:
        nonlocal answer
        if answer is None or not (
            with_calls or "tool_calls" in answer[0] or not _has_answer(answer[0])
        ):
            answer = [{"role": "assistant", "content": ""}]
            groups.append(answer)
        return answer[0]

    for item in items:
        match item:
            case InputMessage(role="assistant"):
                going_on()["content"] += text_of(item.content)
            case ReasoningInput():
                if text := "".join(part.text for part in item.content or ()):
                    message = going_on()
                    message["reasoning_content"] = message.get("reasoning_content", "") + text
            case FunctionCallInput():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                going_on(with_calls=True).setdefault("tool_calls", []).append(call)
                assert answer is not None
                group_of[item.call_id] = answer
            case InputMessage():
                role = "system" if item.role == "developer" else item.role
                groups.append([{"role": role, "content": text_of(item.content)}])
                answer = None
            case FunctionCallOutput():
                output = text_of(item.output)
                result = {"role": "tool", "tool_call_id": item.call_id, "content": output}
                group = group_of.get(item.call_id)
                if group is None:
                    groups.append([result])
                else:
                    group.append(result)
                if group is answer or group is None:
                    answer = None
    if answer is not None and not _has_answer(answer[0]) and answer[0].get("reasoning_content"):
        groups.pop()
    messages = [message for group in groups for message in group]
    for message in messages:
        if message.get("tool_calls"):
            message["content"] = message["content"] or None
    return messages


def _has_answer(message: Mapping[str, Any]) -> bool:
    """Returns whether a message of the assistant has more than reasoning."""
    return bool(message["content"] or message.get("tool_calls"))
