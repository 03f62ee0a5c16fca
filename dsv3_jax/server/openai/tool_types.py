"""Tools and tool calls in the bodies of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, JsonValue

from dsv3_jax.server.openai.body import Body

FunctionName = Annotated[str, Field(min_length=1, max_length=256)]


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    """A JSON schema."""
    strict: bool | None = None
    """Accepted and ignored: arguments are not checked against the schema."""


class Tool(Body):
    """A tool. All of them are functions."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Returns the tool as chat templates read it."""
        function = self.function.model_dump(exclude={"strict"})
        present = {name: value for name, value in function.items() if value is not None}
        return {"type": self.type, "function": present}


class CalledFunction(Body):
    """The function of a tool call."""

    name: FunctionName
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(Body):
    """A tool call in the history."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Accepted and ignored: the position in a stream, which some clients keep."""


def _check_choice(choice: str | dict[str, JsonValue]) -> str | dict[str, JsonValue]:
    if choice not in ("none", "auto"):
        raise ValueError(
            "tool_choice: expected none or auto, as a required or named tool needs a grammar for"
            f" tool calls, which is not supported yet; got {choice!r:.80}"
        )
    return choice


ToolChoice = Annotated[str | dict[str, JsonValue], AfterValidator(_check_choice)]
Tools = Annotated[list[Tool], Field(max_length=128)]


class AnsweredFunction(BaseModel):
    """The function of a tool call in an answer."""

    name: str
    arguments: str


class AnsweredCall(BaseModel):
    """A tool call in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: AnsweredFunction
