"""Bodies of requests: how they are read, and the base of their types.

Whatever a client sends costs time and memory that grow linearly with its size. The numbers of
values, texts and objects are counted in the bytes before anything is built of them. Validation
stops at the first wrong element of a list, and the alternatives of a long field are told apart by
its first element, so that no error is built for each element and alternative. Large bodies are read
in threads.
"""

from __future__ import annotations

import email.message
import functools
import itertools
import json
import math
import typing
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Protocol

import pydantic_core
from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from dsv3_jax.generation.settings import check_unicode
from dsv3_jax.server.errors import UNKNOWN_FIELDS, ApiError, invalid_body

MAX_VALUES = 270_000
"""Most values of a body, the keys of its objects included. Each token id is one; the
longest context of the family has 262,144."""
MAX_TEXTS = 100_000
"""Most texts among them, keys included."""
MAX_OBJECTS = 50_000
"""Most lists and objects among them."""
MAX_DEPTH = 200
"""Most levels of lists and objects; the JSON parser's."""

Json = Any
"""Any value of JSON. It comes from :func:`read_json`; pydantic's JsonValue would call a function of
Python for each of its parts again."""

_SMALL = 2**14  # bytes of a body that is read in the event loop
_PIECE = 2**18  # bytes that are taken apart at a time
_MAX_FIELDS = 256  # more than any body has at its top level
_SHOWN_NAMES = 3  # of unknown fields

_MARK = b"\xef\xbb\xbf"  # some clients' texts begin with it


def read_json(content: bytes, name: str) -> Any:
    """Returns the value of JSON. Raises ValueError, in one line, for what is no JSON, exceeds a
    limit, or has numbers that are not finite in float64. The limits are checked before it is
    parsed."""
    content = content.removeprefix(_MARK)
    try:
        _check_counts(content)
        value = pydantic_core.from_json(content, allow_inf_nan=False, cache_strings="keys")
    except _LimitError as error:
        raise ValueError(f"{name}: {error}") from None
    except ValueError as error:
        message = str(error)
        if "hex escape" in message:
            _check_surrogates(content)
        if message.startswith("recursion limit"):
            raise ValueError(f"{name}: expected at most {MAX_DEPTH} levels, got more") from None
        raise ValueError(f"{name}: expected JSON: {message}") from None
    fields = value if isinstance(value, dict) else {name: value}
    for field, entry in fields.items():
        _check_numbers(field, entry)
    return value


class _LimitError(ValueError):
    """JSON exceeds a limit."""


def _check_counts(content: bytes) -> None:
    """Raises _LimitError for JSON with too many values. Valid JSON is counted exactly."""
    count = content.count
    objects = count(b"[") + count(b"{")
    # This fast count includes the characters inside texts. Nearly all bodies are below the limits
    # even so.
    if objects <= MAX_OBJECTS and objects + count(b",") + count(b":") < MAX_TEXTS:
        return
    # Quotation marks and backslashes that are left delimit texts.
    plain = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    texts = plain.count(b'"') // 2
    if texts > MAX_TEXTS:
        raise _LimitError(f"expected at most {MAX_TEXTS} texts, keys included, got {texts}")
    objects = values = is_text = 0
    for begin in range(0, len(plain), _PIECE):
        parts = plain[begin : begin + _PIECE].split(b'"')
        outside = b"".join(parts[is_text::2])
        objects += outside.count(b"[") + outside.count(b"{")
        values += outside.count(b",") + outside.count(b":")
        is_text ^= (len(parts) - 1) % 2
    values += objects + 1
    if objects > MAX_OBJECTS:
        raise _LimitError(f"expected at most {MAX_OBJECTS} lists and objects, got {objects}")
    if values > MAX_VALUES:
        raise _LimitError(f"expected at most {MAX_VALUES} values, keys included, got {values}")


def _check_numbers(name: str, value: Any) -> None:
    """Raises ValueError for a number that is not finite in float64, such as 1e999 and 10^400."""
    nodes = [value]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            nodes += node.values()
        elif isinstance(node, list):
            kinds = set(map(type, node))
            if kinds and kinds <= {int, float}:  # the usual long list has token ids
                nodes += (min(node), max(node))
            elif kinds != {str}:
                nodes += [entry for entry in node if isinstance(entry, dict | list | int | float)]
        elif isinstance(node, int | float) and not _is_finite(node):
            raise ValueError(f"{name:.200}: expected numbers of float64, got one out of range")


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # of a large integer
        return False


def _check_surrogates(content: bytes) -> None:
    """Raises ValueError with the name of the field if JSON has an escaped lone surrogate, which is
    no Unicode. Other parsers accept them, so that a client may not know."""
    try:
        nodes: list[tuple[str, Any]] = [("", json.loads(content))]
    except (ValueError, RecursionError):
        return
    while nodes:
        name, node = nodes.pop()
        if isinstance(node, dict):
            nodes += [(f"{name}.{key:.60}"[:200], entry) for key, entry in node.items()]
        elif isinstance(node, list):
            nodes += [(f"{name}.{i}"[:200], entry) for i, entry in enumerate(node)]
        elif isinstance(node, str):
            check_unicode(name[1:], node)


class Body(BaseModel):
    """A body, or a part of one. Fields that it does not have are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_unknown(cls, value: Any) -> Any:
        """Refuses many unknown fields at once, as each would have an error otherwise."""
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            _refuse_unknown(cls, value)
        return value


def _refuse_unknown(kind: type[BaseModel], value: Mapping[str, Any]) -> None:
    """Raises PydanticCustomError with the first fields that ``kind`` does not have."""
    known = {field.alias or name for name, field in kind.model_fields.items()}
    unknown = (f"{name:.60}" for name in value if name not in known)
    names = ", ".join(itertools.islice(unknown, _SHOWN_NAMES))
    raise PydanticCustomError(UNKNOWN_FIELDS, "{names}", {"names": names})


def at_most(count: int) -> BeforeValidator:
    """Returns a validator that refuses longer objects before their elements are validated. Lists
    have ``fail_fast`` instead."""

    def check(value: Any) -> Any:
        if isinstance(value, Collection) and len(value) > count:
            counts = {"most": count, "got": len(value)}
            raise PydanticCustomError("too_many", "expected at most {most} keys, {got}", counts)
        return value

    return BeforeValidator(check)


class AnswerPart(Body):
    """A part of an earlier answer. Nulls in place of fields that it does not have are left out:
    clients keep answers in types of their own, and send all fields of these back."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return {k: v for k, v in part.items() if v is not None or k in cls.model_fields}


class _TextPart(Protocol):
    text: str


def text_of(content: str | Sequence[_TextPart]) -> str:
    """Returns content that is text, or has parts with text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def without_refused(body: Any, refused: Mapping[str, str]) -> Any:
    """Returns a body without fields that are refused. Clients may send them as null or empty."""
    if not isinstance(body, dict):
        return body
    for name, reason in refused.items():
        if body.get(name):
            raise ValueError(f"{name}: expected none: {reason}")
    return {name: value for name, value in body.items() if name not in refused}


def read_body(kind: type[BaseModel], content: bytes) -> BaseModel:
    """Returns the body of a request, or raises ApiError."""
    try:
        value = read_json(content, "body")
    except ValueError as error:
        param = str(error).partition(":")[0].partition(".")[0]
        raise ApiError(400, str(error), param=None if param == "body" else param) from None
    try:
        if isinstance(value, dict) and len(value) > _MAX_FIELDS:
            _refuse_unknown(kind, value)
        return kind.model_validate(value)
    except PydanticCustomError as error:
        details = {"type": error.type, "loc": (), "msg": error.message()}
        raise invalid_body([details], value) from None
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False), value) from None


class BodyRoute(APIRoute):
    """A route whose endpoint is a function of a body and the request. FastAPI describes it, but
    does not read the body: :func:`read_body` does, in a thread if it is large."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint
        kind = typing.get_type_hints(endpoint)["body"]

        async def handle(request: Request) -> Response:
            if not _is_json(request.headers.get("content-type", "")):
                raise ApiError(400, "body: expected one of type application/json, got another type")
            # Not request.body(), which would keep the bytes until the answer ends.
            content = b"".join([part async for part in request.stream()])
            if len(content) <= _SMALL:
                body = read_body(kind, content)
            else:
                service = request.app.state.service
                read = functools.partial(read_body, kind, content)
                body = await service.in_thread(read, "bodies")
                del read
            del content
            return await endpoint(body, request)

        return handle


def _is_json(content_type: str) -> bool:
    message = email.message.Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (
        subtype == "json" or subtype.endswith("+json")
    )
