"""/v1/messages: the next message of a conversation, in Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, JsonValue
from starlette.responses import Response

from dsv3_jax.generation.completion import Completion
from dsv3_jax.server.anthropic.request_types import CountRequest, MessagesRequest
from dsv3_jax.server.conversation import SubmittedConversation, json_object
from dsv3_jax.server.errors import ApiError, MessagesErrorBody
from dsv3_jax.server.openai.answer import Answer
from dsv3_jax.server.openai.body import BodyRoute
from dsv3_jax.server.openai.sampling_fields import Usage
from dsv3_jax.server.parsers.tool_parser import CallArguments, CallBegin, Content, Event, Reasoning
from dsv3_jax.server.service import service_of
from dsv3_jax.server.sse import STREAMED, NamedEvent, NamedEventFormat, unless_gone

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


class BlockStream:
    """Turns events into the blocks of a stream, one after the other."""

    def __init__(self) -> None:
        self._index = -1
        self._open: AnyContent | None = None

    def add(self, events: Sequence[Event]) -> Iterator[NamedEvent]:
        for event in events:
            match event:
                case Content(text):
                    yield from self._begin(TextContent())
                    delta = {"type": "text_delta", "text": text}
                case Reasoning(text):
                    yield from self._begin(ThinkingContent())
                    delta = {"type": "thinking_delta", "thinking": text}
                case CallBegin(_, call_id, name):
                    yield from self._begin(ToolUseContent(id=call_id, name=name))
                    continue
                case CallArguments(_, text):
                    delta = {"type": "input_json_delta", "partial_json": text}
            yield NamedEvent.of("content_block_delta", index=self._index, delta=delta)

    def _begin(self, block: AnyContent) -> Iterator[NamedEvent]:
        """Begins a block, unless text of the same kind goes on."""
        if type(block) is type(self._open) and not isinstance(block, ToolUseContent):
            return
        yield from self.end()
        self._index += 1
        self._open = block
        yield NamedEvent.of("content_block_start", index=self._index, content_block=block)

    def end(self) -> Iterator[NamedEvent]:
        if self._open is not None:
            yield NamedEvent.of("content_block_stop", index=self._index)
            self._open = None


def blocks_of(events: Sequence[Event]) -> list[AnyContent]:
    """Returns the blocks of a whole answer. The input of a call is an object, as clients expect it:
    arguments that are none become its field ``INVALID_JSON``, as Anthropic recommends."""
    blocks: list[AnyContent] = []
    arguments: list[str] = []
    for event in events:
        last = blocks[-1] if blocks else None
        match event:
            case Content(text) if isinstance(last, TextContent):
                last.text += text
            case Content(text):
                blocks.append(TextContent(text=text))
            case Reasoning(text) if isinstance(last, ThinkingContent):
                last.thinking += text
            case Reasoning(text):
                blocks.append(ThinkingContent(thinking=text))
            case CallBegin(_, call_id, name):
                blocks.append(ToolUseContent(id=call_id, name=name))
                arguments.append("")
            case CallArguments(_, text):
                arguments[-1] += text
    calls = [block for block in blocks if isinstance(block, ToolUseContent)]
    for call, text in zip(calls, arguments, strict=True):
        value = json_object(text)
        call.input = {"INVALID_JSON": text} if value is None else value
    return blocks


router = APIRouter(
    prefix="/v1/messages",
    route_class=BodyRoute,
    responses={"4XX": {"model": MessagesErrorBody}, "5XX": {"model": MessagesErrorBody}},
)


@router.post("", response_model=MessageAnswer, responses=STREAMED)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answers a conversation. With ``stream``, returns named server-sent events."""
    service = service_of(request)
    service.check_model(body.model)
    submission = body.conversation().submit(
        service, n=1, prompt_field="messages", **body.engine_settings()
    )
    submitted = await unless_gone(request, submission)
    return await _Answer(request, body, submitted).respond(stream=bool(body.stream))


@router.post("/count_tokens", response_model=TokenCount)
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """Returns the number of tokens of a conversation."""
    service = service_of(request)
    service.check_model(body.model)

    def count() -> TokenCount:
        ids = body.conversation().encode(service.tokenizer, service.settings.max_len)
        return TokenCount(input_tokens=len(ids))

    try:
        content = (await service.in_thread(count, "prompts")).model_dump_json()
    except ValueError as error:
        raise ApiError.of_engine(error, "messages") from None
    return Response(content, media_type="application/json")


class _Answer(Answer):
    id_prefix = "msg_"
    event_format = NamedEventFormat(
        lambda error: NamedEvent.of("error", error=error.messages_body.error)
    )

    def __init__(self, request: Request, body: MessagesRequest, submitted: SubmittedConversation):
        super().__init__(request, body.model, submitted.job)
        self._stops = body.stop_sequences or []
        self._prompt_tokens = submitted.prompt_tokens
        self._parser = submitted.parsers[0]
        self._skips_special_tokens = submitted.skips_special_tokens

    def body(self, completions: list[Completion]) -> MessageAnswer:
        (completion,) = completions
        blocks = blocks_of(self._parser.add(completion.text, is_last=True))
        reason, sequence = self._stop(completion)
        return MessageAnswer(
            id=self.id,
            model=self.model,
            content=blocks,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=MessagesUsage.of(self.usage(completions)),
        )

    async def events(self) -> AsyncGenerator[NamedEvent, None]:
        usage = MessagesUsage(input_tokens=self._prompt_tokens, output_tokens=0)
        yield NamedEvent.of(
            "message_start",
            message=MessageAnswer(
                id=self.id,
                model=self.model,
                content=[],
                stop_reason=None,
                stop_sequence=None,
                usage=usage,
            ),
        )
        blocks = BlockStream()
        async for _, piece in self.job.pieces():
            is_last = piece.finish_reason is not None
            for event in blocks.add(self._parser.add(piece.text, is_last=is_last)):
                yield event
        for event in blocks.end():
            yield event
        completion = self.job.completion(0)
        reason, sequence = await self.service.in_thread(lambda: self._stop(completion), "answers")
        yield NamedEvent.of(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=MessagesUsage.of(self.final_usage()),
        )
        yield NamedEvent.of("message_stop")

    def _stop(self, completion: Completion) -> tuple[StopReason, str | None]:
        """Returns the reason of the answer's end, and the stop sequence if it is the reason."""
        if self._parser.finish_reason(completion.finish_reason) == "tool_calls":
            return "tool_use", None
        if completion.finish_reason == "length":
            return "max_tokens", None
        sequence = self._stop_sequence(completion)
        return ("end_turn", None) if sequence is None else ("stop_sequence", sequence)

    def _stop_sequence(self, completion: Completion) -> str | None:
        """Returns the stop sequence that ended an answer, or None."""
        if not (self._stops and completion.tokens):
            return None
        # One that spells a special token is no text, but a token that ends the answer.
        last = completion.tokens[-1]
        special = [s for s in self._stops if self.tokenizer.special_token_id(s) == last]
        if special:
            return special[0]
        # The completion's text ends before the stop sequence. That of its tokens does not.
        text = self.tokenizer.decode(
            completion.tokens, skip_special_tokens=self._skips_special_tokens
        )
        begin = len(completion.text)
        matching = [s for s in self._stops if text.startswith(s, begin)]
        # The shortest of them was complete first.
        return min(matching, key=len, default=None) if text.startswith(completion.text) else None
