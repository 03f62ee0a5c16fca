"""Tools and tool calls in the bodies of /v1/chat/completions and /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

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
        return self.function.name if self.function else self.name


ToolChoice = Literal["none", "auto", "required"] | NamedTool


Tools = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]


class _DescribedTool(Protocol):
    def for_template(self) -> dict[str, Any]: ...


def tool_settings(
    choice: ToolChoice | None, tools: Sequence[_DescribedTool] | None, parallel: bool | None
) -> dict[str, Any]:
    """Returns the fields of a :class:`~dsv3_jax.server.conversation.Conversation` about tools. With
    the choice ``none``, the model learns of none. A tool that is named is called once. Raises
    ValueError for a choice that requires tools that are not there."""
    described = [] if choice == "none" else [tool.for_template() for tool in tools or ()]
    required = described
    if choice in (None, "none", "auto"):
        required = []
    elif not described:
        raise ValueError("tool_choice: expected none or auto without tools, got another choice")
    elif isinstance(choice, NamedTool):
        required = [tool for tool in described if tool["function"]["name"] == choice.called]
        if not required:
            raise ValueError(
                f"tool_choice: expected the name of one of the tools, got {choice.called!r:.80}"
            )
    may_repeat = parallel is not False and not isinstance(choice, NamedTool)
    return {"tools": described, "required_tools": required, "parallel_calls": may_repeat}


class AnsweredFunction(BaseModel):
    """The function of a tool call in an answer."""

    name: str
    arguments: str


class AnsweredCall(BaseModel):
    """A tool call in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: AnsweredFunction
