"""/tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response

from dsv3_jax.generation.request import check_fits
from dsv3_jax.server.conversation import Conversation
from dsv3_jax.server.errors import ApiError
from dsv3_jax.server.openai.body import Body, BodyRoute
from dsv3_jax.server.openai.chat import Messages
from dsv3_jax.server.openai.completions import TokenId
from dsv3_jax.server.openai.sampling_fields import TemplateArguments
from dsv3_jax.server.openai.tool_types import Tools
from dsv3_jax.server.service import service_of

router = APIRouter(route_class=BodyRoute)


class TokenizeRequest(Body):
    """Text, or a conversation, to encode."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True  # whether BOS precedes a prompt, if the model expects it
    add_generation_prompt: bool = True  # whether a conversation ends where the answer begins
    chat_template_kwargs: TemplateArguments | None = None

    @model_validator(mode="after")
    def _check_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: expected either prompt or messages, got both or none")
        return self


class TokenizeResponse(BaseModel):
    """Token ids."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Body):
    """Token ids to decode."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class DetokenizeResponse(BaseModel):
    """Text of the tokens, special ones included."""

    prompt: str


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Encodes text or a conversation. Text never becomes a control token."""
    service = service_of(request)
    service.check_model(body.model)

    def encode() -> list[int]:
        if body.prompt is not None:
            check_fits("prompt", body.prompt, service.tokenizer, service.settings.max_len)
            return service.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        conversation = Conversation(
            [message.for_template() for message in body.messages or ()],
            [tool.for_template() for tool in body.tools or ()],
            arguments=body.chat_template_kwargs or {},
        )
        return conversation.encode(
            service.tokenizer,
            service.settings.max_len,
            add_generation_prompt=body.add_generation_prompt,
        )

    def answer() -> Response:
        tokens, most = encode(), service.settings.max_len
        return _answer(TokenizeResponse(count=len(tokens), max_model_len=most, tokens=tokens))

    try:
        return await service.in_thread(answer, "prompts")
    except ValueError as error:
        raise ApiError.of_engine(error, "messages" if body.prompt is None else "prompt") from None


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Decodes token ids."""
    service = service_of(request)
    service.check_model(body.model)
    last = service.tokenizer.vocab_size - 1

    def answer() -> Response:
        if (most := max(body.tokens, default=0)) > last:
            message = f"tokens: expected token ids from 0 to {last}, got {most}"
            raise ApiError(400, message, param="tokens")
        text = service.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return _answer(DetokenizeResponse(prompt=text))

    return await service.in_thread(answer, "answers")


def _answer(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")
