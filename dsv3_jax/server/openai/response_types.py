"""Bodies of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, JsonValue, PrivateAttr, model_validator

from dsv3_jax.server.conversation import Conversation
from dsv3_jax.server.grammar import GrammarSource
from dsv3_jax.server.openai import sampling_fields
from dsv3_jax.server.openai.body import Body, Json, without_refused
from dsv3_jax.server.openai.response_input import InputItem, Status, messages_of
from dsv3_jax.server.openai.tool_types import (
    ResponseTool,
    ToolChoice,
    tool_settings,
)

_REFUSED = {
    "previous_response_id": "the server stores no answers; send the whole conversation",
    "conversation": "the server stores no conversations; send the whole conversation",
    "background": "the server stores no answers",
    "prompt": "the server stores no prompts",
    "top_logprobs": "/v1/chat/completions has log-probabilities",
    "max_tool_calls": "the server itself calls no tools",
}


class JsonSchemaForm(sampling_fields.NamedSchema):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]

    def source(self, field: str) -> GrammarSource | None:
        return GrammarSource.of_schema(self.schema_, field)


Form = Annotated[
    sampling_fields.TextFormat | sampling_fields.JsonObjectFormat | JsonSchemaForm,
    Field(discriminator="type"),
]


class TextSettings(Body):
    """The form of the text."""

    format: Form | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # accepted and ignored


class ReasoningSettings(Body):
    """Whether the answer begins with reasoning, if the chat template leaves the choice."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """``none`` switches reasoning off; all others switch it on."""
    summary: str | None = None
    """Accepted and ignored: the reasoning is sent as it is."""
    generate_summary: str | None = None


class ResponsesRequest(Body):
    """A request for an answer."""

    model: str
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=4096, fail_fast=True)]
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    reasoning: ReasoningSettings | None = None
    text: TextSettings | None = None
    stream: bool | None = None
    truncation: Literal["disabled"] | None = None
    chat_template_kwargs: sampling_fields.TemplateArguments | None = None

    # Settings that vLLM added. The gateway smg sends them with every request.
    top_k: sampling_fields.TopK | None = None
    min_p: sampling_fields.MinP | None = None
    repetition_penalty: sampling_fields.RepetitionPenalty | None = None
    priority: sampling_fields.Priority | None = None

    # Accepted and ignored: they change nothing about the text, and nothing is stored.
    store: bool | None = None
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    metadata: sampling_fields.Metadata | None = None
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    stream_options: dict[str, Json] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_refused(cls, body: Any) -> Any:
        return without_refused(body, _REFUSED)

    _grammar: GrammarSource | None = PrivateAttr(None)

    @property
    def grammar(self) -> GrammarSource | None:
        """Description of the text, or None for any text."""
        return self._grammar

    @model_validator(mode="after")
    def _read_grammar(self) -> ResponsesRequest:
        form = self.text and self.text.format
        self._grammar = form.source("text") if form else None
        if self._tool_settings()["tools"] and self._grammar is not None:
            raise ValueError(
                "tools: expected none with text.format, which an answer with tool calls could not"
                " match; got both"
            )
        return self

    def conversation(self) -> Conversation:
        if isinstance(self.input, str):
            messages = [{"role": "user", "content": self.input}]
        else:
            messages = messages_of(self.input)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        effort = self.reasoning and self.reasoning.effort
        thinking = effort != "none" if effort else None
        return Conversation(
            messages=messages,
            thinking=thinking,
            arguments=self.chat_template_kwargs or {},
            **self._tool_settings(),
        )

    def _tool_settings(self) -> dict[str, Any]:
        return tool_settings(self.tool_choice, self.tools, self.parallel_tool_calls)

    def engine_settings(self) -> dict[str, Any]:
        """Returns the settings of :meth:`dsv3_jax.Engine.submit_all`. Without a limit of tokens, an
        answer can fill the context."""
        settings = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "priority": self.priority,
        }
        present = {name: value for name, value in settings.items() if value is not None}
        return {**present, "max_new_tokens": self.max_output_tokens}


class OutputText(BaseModel):
    """Text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[JsonValue] = []
    logprobs: list[JsonValue] = []


class ReasoningText(BaseModel):
    """Text of the reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class Item(BaseModel):
    """Base class of all items."""

    id: str
    status: Status = "in_progress"


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(Item):
    """The reasoning. It is no summary."""

    type: Literal["reasoning"] = "reasoning"
    summary: list[JsonValue] = []
    content: list[ReasoningText] = []


class FunctionCallItem(Item):
    """A tool call."""

    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    arguments: str = ""


AnyItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(BaseModel):
    """Parts of the input's tokens."""

    cached_tokens: int


class OutputTokensDetails(BaseModel):
    """Parts of the output's tokens."""

    reasoning_tokens: int  # generated tokens of the reasoning, without its markers


class ResponseUsage(BaseModel):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: sampling_fields.Usage, reasoning_tokens: int) -> ResponseUsage:
        """Returns the usage in the shape of this endpoint."""
        cached = usage.prompt_tokens_details.cached_tokens
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=cached),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning_tokens),
            total_tokens=usage.total_tokens,
        )


class IncompleteDetails(BaseModel):
    """Reason of an incomplete answer."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseBody(BaseModel):
    """An answer, with the settings of its request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: list[AnyItem]
    usage: ResponseUsage | None
    incomplete_details: IncompleteDetails | None = None
    error: None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    store: Literal[False] = False
    temperature: float
    text: dict[str, Json]
    tool_choice: ToolChoice
    tools: list[dict[str, Json]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    user: str | None
