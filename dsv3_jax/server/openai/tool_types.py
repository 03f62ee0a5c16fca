"""Tools and tool calls in the bodies of /v1/chat/completions and /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from dsv3_jax.server.openai.body import AnswerPart, Body, Json
from dsv3_jax.server.parsers.tool_parser import NAME

FunctionName = Annotated[str, Field(pattern=f"^{NAME}$")]
CallId = Annotated[str, Field(min_length=1, max_length=512)]
"""Id of a tool call. That of Kimi-K2 contains the function's name."""


_DESCRIPTION = ("name", "description", "parameters")


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Json] | None = None
    strict: bool | None = None
    """Accepted and ignored: arguments match the schema if ``tool_choice`` requires a call, and are
    not checked otherwise."""


class Tool(Body):
    """A tool. All of them are functions."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Returns the tool as chat templates read it."""
        function = {name: getattr(self.function, name) for name in _DESCRIPTION}
        present = {name: value for name, value in function.items() if value is not None}
        return {"type": self.type, "function": present}


class ResponseTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]

    def for_template(self) -> dict[str, Any]:
        """Returns the tool as chat templates read it."""
        return Tool.model_construct(type="function", function=self).for_template()


class CalledFunction(AnswerPart):
    """The function of a tool call."""

    name: FunctionName
    arguments: str  # JSON, as the model wrote it


class ToolCall(AnswerPart):
    """A tool call in the history."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Accepted and ignored: the position in a stream, which some clients keep."""


class NamedFunction(Body):
    """Names a function."""

    name: FunctionName


class NamedTool(Body):
    """The tool that the model has to call. In /v1/responses, its name is outside ``function``."""

    type: Literal["function"]
    function: NamedFunction | None = None
    name: FunctionName | None = None

    @property
    def called(self) -> str | None:
        """The name of the function."""
        return self.function.name if self.function else self.name


ToolChoice = Literal["none", "auto", "required"] | NamedTool


Tools = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]


def described_tools(
    choice: ToolChoice | None, tools: Sequence[Tool | ResponseTool] | None
) -> list[dict[str, Any]]:
    """Returns tools as chat templates read them. With the choice ``none``, the model learns of
    none."""
    return [] if choice == "none" else [tool.for_template() for tool in tools or ()]


def required_tools(
    choice: ToolChoice | None, tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the tools from which an answer has to call one, or none if it is free. Raises
    ValueError if there are no such tools."""
    if choice in (None, "none", "auto"):
        return []
    if not tools:
        raise ValueError("tool_choice: expected none or auto without tools, got another choice")
    if not isinstance(choice, NamedTool):
        return list(tools)
    named = [tool for tool in tools if tool["function"]["name"] == choice.called]
    if not named:
        raise ValueError(
            f"tool_choice: expected the name of one of the tools, got {choice.called!r:.80}"
        )
    return named


def allows_parallel_calls(choice: ToolChoice | None, parallel: bool | None) -> bool:
    """Returns whether an answer may contain several calls. A tool that is named is called once."""
    return parallel is not False and not isinstance(choice, NamedTool)


class AnsweredFunction(BaseModel):
    """The function of a tool call in an answer."""

    name: str
    arguments: str


class AnsweredCall(BaseModel):
    """A tool call in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: AnsweredFunction
