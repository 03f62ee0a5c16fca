"""Answers for the page, with the tokens that were drafted.

Clients use /v1/chat/completions, whose chunks do not mark drafts. The page sends the
same body here.
"""

from __future__ import annotations

import bisect
from collections.abc import AsyncGenerator, Iterator
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from dsv3_jax.generation.completion import Completion, Piece
from dsv3_jax.server.conversation import SubmittedConversation
from dsv3_jax.server.openai.answer import Answer
from dsv3_jax.server.openai.body import BodyRoute
from dsv3_jax.server.openai.chat import ChatRequest
from dsv3_jax.server.parsers.answer_parser import AnswerParser
from dsv3_jax.server.parsers.tool_parser import Content, Reasoning
from dsv3_jax.server.service import service_of
from dsv3_jax.tokenizer import Tokenizer

router = APIRouter(route_class=BodyRoute, include_in_schema=False)


class Span(BaseModel):
    """A piece of an answer."""

    kind: Literal["reasoning", "content"]
    text: str
    is_draft: bool  # whether its tokens were accepted drafts


class Spans(BaseModel):
    """New text of an answer."""

    spans: list[Span]
    finish_reason: str | None


@router.post("/chat/spans")
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answers a conversation with a stream of spans. Tool calls are left out."""
    service = service_of(request)
    service.check_model(body.model)
    submitted = await body.conversation().submit(
        service, n=1, prompt_field="messages", grammar=body.grammar, **body.engine_settings()
    )
    return await _Answer(request, body, submitted).respond(stream=True)


class _Answer(Answer):
    id_prefix = "spans-"

    def __init__(self, request: Request, body: ChatRequest, submitted: SubmittedConversation):
        super().__init__(request, body.model, submitted.job)
        self._parser = submitted.parsers[0]

    def body(self, completions: list[Completion]) -> BaseModel:
        """The page only reads streams."""
        raise NotImplementedError

    async def events(self) -> AsyncGenerator[Spans, None]:
        position = 0
        async for _, piece in self.job.pieces():
            end = position + len(piece.tokens)
            # In order: looking them up costs nothing that grows with the answer.
            accepted = self.job.handles[0].accepted_drafts
            first = bisect.bisect_left(accepted, position)
            drafts = set(accepted[first : first + len(piece.tokens)])
            texts = split(piece, [i in drafts for i in range(position, end)], self.tokenizer)
            position = end
            spans = [
                Span(kind=kind, text=text, is_draft=is_draft)
                for part, is_draft in texts
                for kind, text in _parts(self._parser, part, is_last=False)
            ]
            if piece.finish_reason is not None:
                last = _parts(self._parser, "", is_last=True)
                spans += [Span(kind=kind, text=text, is_draft=False) for kind, text in last]
            if spans or piece.finish_reason is not None:
                yield Spans(spans=spans, finish_reason=piece.finish_reason)
        self.final_usage()


def split(piece: Piece, is_draft: list[bool], tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Returns the texts of a piece with whether they were drafted. If tokens share a character, the
    piece is one text, and drafted if all its tokens were."""
    texts = [tokenizer.decode([token]) for token in piece.tokens]
    if "".join(texts) != piece.text:
        return [(piece.text, bool(is_draft) and all(is_draft))]
    return list(zip(texts, is_draft, strict=True))


def _parts(
    parser: AnswerParser, text: str, *, is_last: bool
) -> Iterator[tuple[Literal["reasoning", "content"], str]]:
    for event in parser.add(text, is_last=is_last):
        if isinstance(event, Reasoning | Content):
            yield "reasoning" if isinstance(event, Reasoning) else "content", event.text
