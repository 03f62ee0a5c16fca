"""Fields that the bodies of completions and chats have in common.

:class:`StructuredOutputs` and :data:`ResponseFormat` say what an answer's text has to match.

With ``kv_transfer_params`` vLLM's proxies connect prefill and decode: such a proxy sends a prompt
to a prefill server with ``do_remote_decode`` and one token to generate, and then to a decode server
with the parameters of that answer. Here the second request alone would do, since a decode server
asks prefill servers itself. The parameters tell it which one has the pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)
from starlette.requests import Request

import dsv3_jax
from dsv3_jax.generation.completion import Completion
from dsv3_jax.server.errors import ApiError
from dsv3_jax.server.grammar import MAX_TEXT, GrammarSource
from dsv3_jax.server.openai.body import Body, Json, at_most, read_json

if TYPE_CHECKING:  # the types of bodies can be imported without JAX
    from dsv3_jax.disaggregation.peers import Peer
    from dsv3_jax.server.service import Service

SYSTEM_FINGERPRINT = f"dsv3_jax-{dsv3_jax.__version__}"

_MAX_INT = 2**63 - 1

Penalty = Annotated[float, Field(ge=-2, le=2)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(ge=1e-3, le=1e3)]
Priority = Annotated[int, Field(ge=-1000, le=1000)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
StopStrings = Annotated[list[StopString], Field(max_length=16, fail_fast=True)]
Metadata = Annotated[dict[str, str], Field(max_length=64), at_most(64)]
"""Accepted and ignored. OpenAI allows 16 pairs."""


# Arguments of Tokenizer.chat, and tools, which are a field. With split_special_tokens, text could
# become control tokens.
_RESERVED = frozenset(
    ("self", "messages", "add_generation_prompt", "split_special_tokens", "tools")
)


def _check_arguments(arguments: dict[str, Json]) -> dict[str, Json]:
    for name in arguments:
        if name in _RESERVED:
            raise ValueError(f"chat_template_kwargs: expected no {name!r}, which is reserved")
    return arguments


TemplateArguments = Annotated[
    dict[str, Json], Field(max_length=32), at_most(32), AfterValidator(_check_arguments)
]


class TextForm(Protocol):
    """A description of the text."""

    def source(self, field: str) -> GrammarSource | None:
        """Returns its grammar, or None for any text. Errors name the body's ``field``."""
        ...


Schema = dict[str, Json] | bool

Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]

Choices = Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)]

_OBJECT: Schema = {"type": "object"}
_NAMES = ("json", "json_object", "regex", "choice", "grammar")


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]

    def source(self, field: str) -> GrammarSource | None:
        return None


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]

    def source(self, field: str) -> GrammarSource | None:
        return GrammarSource.of_schema(_OBJECT, field)


class NamedSchema(Body):
    """A JSON schema with its name."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")] = _OBJECT
    strict: bool | None = None  # accepted and ignored: an answer always matches


class JsonSchemaFormat(Body):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def source(self, field: str) -> GrammarSource | None:
        return GrammarSource.of_schema(self.json_schema.schema_, field)


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(Body):
    """The same as in vLLM: exactly one of several descriptions of the text."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    """A JSON schema, or one as text."""
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None

    @model_validator(mode="after")
    def _check_count(self) -> StructuredOutputs:
        fields = {name: "json_" if name == "json" else name for name in _NAMES}
        names = [name for name, field in fields.items() if getattr(self, field) is not None]
        if len(names) != 1:
            got = ", ".join(names) or "none"
            raise ValueError(f"structured_outputs: expected one of {', '.join(_NAMES)}; got {got}")
        return self

    def source(self, field: str) -> GrammarSource | None:
        if self.regex is not None:
            return GrammarSource("regex", self.regex, field)
        if self.grammar is not None:
            return GrammarSource("lark", self.grammar, field)
        if self.choice is not None:
            return GrammarSource.of_choices(self.choice, field)
        schema = _OBJECT if self.json_object else self.json_
        if isinstance(schema, str):
            try:
                schema = read_json(schema.encode(), "text")
            except ValueError as error:
                raise ValueError(f"{field}: json: expected a JSON schema: {error}") from None
        return GrammarSource.of_schema(schema, field)


_NAME = "kv_transfer_params"


class KvTransferParams(BaseModel):
    """Parameters of a proxy. Those of vLLM's connectors that have no meaning here are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    do_remote_decode: bool | None = None
    """Whether the answer should say where the pages of the prompt are."""
    do_remote_prefill: bool | None = None
    """Whether a prefill server has the pages of the prompt."""
    remote_host: str | None = None
    """Host of that server, which has to be one of ``--prefill-url``."""
    remote_port: Annotated[int, Field(ge=1, lt=2**16)] | None = None

    def peer(self, service: Service) -> Peer | None:
        """Returns the prefill server that has the pages, or None."""
        if self.do_remote_decode and not service.is_prefill_server:
            raise _refused("do_remote_decode", "a server with --role prefill")
        if not self.do_remote_prefill:
            return None
        if service.remote is None:
            raise _refused("do_remote_prefill", "a server with --role decode")
        peer = service.remote.peers.at(self.remote_host, self.remote_port)
        if peer is None:
            where = f"{self.remote_host}:{self.remote_port}"
            raise _refused("remote_host", f"the host and port of a --prefill-url, got {where:.200}")
        return peer

    def answer(self, request: Request) -> dict[str, Any]:
        """Returns the fields that the answer of a prefill server has in addition."""
        if not self.do_remote_decode:
            return {}
        host, port = _address(request)
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": host,
            "remote_port": port,
        }
        return {_NAME: params}


def _address(request: Request) -> tuple[str | None, int | None]:
    """Returns the host and port at which the client has reached the server."""
    try:
        return request.url.hostname, request.url.port
    except ValueError:  # the header Host has another form
        host, port = request.scope.get("server") or (None, None)
        return host, port


def _refused(field: str, expected: str) -> ApiError:
    return ApiError(400, f"{_NAME}.{field}: expected {expected}", param=_NAME)


class StreamOptions(Body):
    """Selects parts of a stream other than the text."""

    include_usage: bool | None = None  # whether the last chunk has the usage
    include_obfuscation: bool | None = None  # accepted and ignored


class SamplingFields(Body):
    """The model, how it samples, and when it stops."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-_MAX_INT - 1, le=_MAX_INT)] | None = None
    stop: StopString | StopStrings | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=300), at_most(300)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Settings that vLLM added.
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=8, fail_fast=True)] | None = None
    priority: Priority | None = None
    structured_outputs: StructuredOutputs | None = None
    kv_transfer_params: KvTransferParams | None = None

    # vllm-router sends all of these with every request. Other values are refused.
    no_stop_trim: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    separate_reasoning: Literal[True] | None = None
    stream_reasoning: Literal[True] | None = None
    include_reasoning: Literal[True] | None = None
    return_hidden_states: Literal[False] | None = None

    # Accepted and ignored: they change nothing about the text.
    user: str | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @field_validator("logit_bias")
    @classmethod
    def _check_logit_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token in value or {}:
            if not (token.isascii() and token.isdecimal() and len(token) < 10):
                raise ValueError(f"logit_bias: expected token ids as keys, got {token!r:.60}")
        return value

    _grammar: GrammarSource | None = PrivateAttr(None)

    @property
    def grammar(self) -> GrammarSource | None:
        """The grammar that the text has to match, or None."""
        return self._grammar

    def text_forms(self) -> Mapping[str, TextForm | None]:
        """Returns the fields that describe the text, by their names."""
        return {"structured_outputs": self.structured_outputs}

    @model_validator(mode="after")
    def _read_grammar(self) -> SamplingFields:
        for field, form in self.text_forms().items():
            source = None if form is None else form.source(field)
            if source is None:
                continue
            if self._grammar is not None:
                raise ValueError(f"{field}: expected none with {self._grammar.field}, got both")
            for name in ("ignore_eos", "min_tokens"):
                if value := getattr(self, name):
                    raise ValueError(
                        f"{name}: expected none with {field}, which decides where the text ends,"
                        f" got {value}"
                    )
            self._grammar = source
        return self

    def engine_settings(self) -> dict[str, Any]:
        """Returns the settings of :meth:`dsv3_jax.Engine.submit_all`, without limits of tokens."""
        settings = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "seed": None if self.seed is None else self.seed % 2**32,
            "stop": self.stop,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": {int(i): bias for i, bias in (self.logit_bias or {}).items()} or None,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop_tokens": self.stop_token_ids,
            "priority": self.priority,
        }
        return {name: value for name, value in settings.items() if value is not None}

    @property
    def includes_usage(self) -> bool:
        """Whether the last chunk of a stream has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class PromptTokensDetails(BaseModel):
    """Parts of the prompt's tokens."""

    cached_tokens: int


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, completions: list[Completion], n: int) -> Usage:
        """Returns the sums over completions. Those of the same prompt, ``n`` in a sequence, count
        its tokens once."""
        prompt = sum(c.prompt_tokens for c in completions[::n])
        new = sum(len(c.tokens) for c in completions)
        cached = sum(c.cached_tokens for c in completions[::n])
        return cls(
            prompt_tokens=prompt,
            completion_tokens=new,
            total_tokens=prompt + new,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )
