"""/tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator

from dsv3_jax.server.conversation import Conversation
from dsv3_jax.server.errors import ApiError
from dsv3_jax.server.openai.body import Body
from dsv3_jax.server.openai.chat_types import Messages, TemplateArguments
from dsv3_jax.server.openai.tool_types import Tools
from dsv3_jax.server.service import Service, service_of

router = APIRouter()

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class TokenizeRequest(Body):
    """Text, or a conversation, to encode."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    """Whether BOS precedes a prompt, if the model expects it."""
    add_generation_prompt: bool = True
    """Whether a conversation ends where the answer begins."""
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
    tokens: Annotated[list[TokenId], Field(max_length=2**20)]


class DetokenizeResponse(BaseModel):
    """Text of the tokens, special ones included."""

    prompt: str


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
    """Encodes text or a conversation. Text never becomes a control token."""
    service = service_of(request)
    _check_model(service, body.model)

    def encode() -> list[int]:
        if body.prompt is not None:
            return service.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        conversation = Conversation(
            [message.for_template() for message in body.messages or ()],
            [tool.for_template() for tool in body.tools or ()],
            arguments=body.chat_template_kwargs or {},
        )
        return conversation.encode(
            service.tokenizer, add_generation_prompt=body.add_generation_prompt
        )

    try:
        tokens = await service.in_thread(encode)
    except ValueError as error:
        raise ApiError.of_engine(error, "messages" if body.prompt is None else "prompt") from None
    return TokenizeResponse(
        count=len(tokens), max_model_len=service.settings.max_len, tokens=tokens
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    """Decodes token ids."""
    service = service_of(request)
    _check_model(service, body.model)
    last = service.tokenizer.vocab_size - 1
    wrong = next((token for token in body.tokens if token > last), None)
    if wrong is not None:
        message = f"tokens: expected token ids from 0 to {last}, got {wrong}"
        raise ApiError(400, message, param="tokens")

    def decode() -> str:
        return service.tokenizer.decode(body.tokens, skip_special_tokens=False)

    return DetokenizeResponse(prompt=await service.in_thread(decode))


def _check_model(service: Service, name: str | None) -> None:
    if name is not None:
        service.check_model(name)
