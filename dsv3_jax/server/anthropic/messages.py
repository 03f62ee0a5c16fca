"""/v1/messages: the next message of a conversation, in Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import Response

from dsv3_jax.generation.completion import Completion
from dsv3_jax.server.anthropic.answer_types import (
    ErrorEvent,
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessagesUsage,
    StopReason,
    TokenCount,
)
from dsv3_jax.server.anthropic.blocks import BlockStream, blocks_of
from dsv3_jax.server.anthropic.request_types import CountRequest, MessagesRequest
from dsv3_jax.server.conversation import SubmittedConversation
from dsv3_jax.server.errors import ApiError, MessagesErrorBody
from dsv3_jax.server.openai.answer import Answer
from dsv3_jax.server.openai.body import BodyRoute
from dsv3_jax.server.service import Service, service_of
from dsv3_jax.server.sse import STREAMED, NamedEvent, NamedEventFormat, unless_gone

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
    answer = _Answer(body, submitted, service, request.state.log)
    return await answer.respond(request, stream=bool(body.stream))


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
    """The answer to one request."""

    event_format = NamedEventFormat(lambda error: ErrorEvent(error=error.messages_body.error))

    def __init__(
        self,
        body: MessagesRequest,
        submitted: SubmittedConversation,
        service: Service,
        log: dict[str, object],
    ):
        super().__init__("msg_", body.model, submitted.job, service, n=1, log=log)
        self._stops = body.stop_sequences or []
        self._prompt_tokens = submitted.prompt_tokens
        self._parser = submitted.parsers[0]
        self._skips_special_tokens = submitted.skips_special_tokens

    def body(self, completions: list[Completion]) -> MessageAnswer:
        """Returns the answer."""
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
        """Yields the events of a stream."""
        usage = MessagesUsage(input_tokens=self._prompt_tokens, output_tokens=0)
        yield MessageStart(
            message=MessageAnswer(
                id=self.id,
                model=self.model,
                content=[],
                stop_reason=None,
                stop_sequence=None,
                usage=usage,
            )
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
        yield MessageDelta(
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=MessagesUsage.of(self.final_usage()),
        )
        yield MessageStop()

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
