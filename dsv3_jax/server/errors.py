"""Errors in OpenAI's shape, ``{"error": {"message", "type", "param", "code"}}``.

Those of /v1/messages have Anthropic's, ``{"type": "error", "error": {"type", "message"}}``.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from dsv3_jax.words import one_line

UNKNOWN_FIELDS = "unknown_fields"
"""Type of a validation error whose message names several fields that an object cannot have."""

_MAX_LINE = 1000  # characters of a message
_MESSAGES = "/v1/messages"

# Names of an engine's settings that have another name in the API.
_API_NAMES = {"max_new_tokens": "max_tokens", "stop_tokens": "stop_token_ids"}


class _Shown(reprlib.Repr):
    """Shows values briefly, in a time that does not depend on their size."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Shows the first keys. The base class sorts all of them before."""
        if level <= 0:
            return "{...}" if x else "{}"
        pairs = itertools.islice(x.items(), self.maxdict)
        shown = [f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in pairs]
        return "{" + ", ".join([*shown, *(["..."] if len(x) > self.maxdict else [])]) + "}"


_SHOWN = _Shown()
_SHOWN.maxlevel, _SHOWN.maxstring, _SHOWN.maxother, _SHOWN.maxlong = 2, 60, 60, 40


class ErrorDetail(BaseModel):
    """Describes an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of a response with a status from 400 on."""

    error: ErrorDetail


class MessagesErrorDetail(BaseModel):
    """Describes an error in Anthropic's API."""

    type: str
    message: str


class MessagesErrorBody(BaseModel):
    """Body of an error of /v1/messages, and event of an error in its streams."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail


# Types of errors in Anthropic's API. Other ones from 400 on are invalid_request_error, and from 500
# on api_error.
_MESSAGES_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error that the client sees: an HTTP status, a message of one line, OpenAI's type of the
    error (``kind``), the field of the body that caused it (``param``), and OpenAI's code, for
    programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        line = one_line(message, _MAX_LINE)
        super().__init__(line)
        self.status = status
        self.headers = dict(headers or {})
        self.body = ErrorBody(error=ErrorDetail(message=line, type=kind, param=param, code=code))

    @property
    def messages_body(self) -> MessagesErrorBody:
        """The error in the shape of Anthropic's API."""
        kind = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _MESSAGES_TYPES.get(self.status, kind)
        detail = MessagesErrorDetail(type=kind, message=self.body.error.message)
        return MessagesErrorBody(error=detail)

    def response(self, scope: Scope) -> Response:
        """Returns the response to a request, whose path decides on the shape."""
        path = endpoint_path(scope)
        is_messages = path == _MESSAGES or path.startswith(f"{_MESSAGES}/")
        body = self.messages_body if is_messages else self.body
        return JSONResponse(body.model_dump(), self.status, self.headers)

    @classmethod
    def of_engine(cls, error: ValueError, prompt_field: str) -> ApiError:
        """Returns the error for a setting or prompt that the engine refused. The message begins
        with the setting's name; that of prompts becomes ``prompt_field``."""
        message = str(error)
        name, colon, rest = message.partition(":")
        is_name = bool(colon) and name.isidentifier()
        is_too_long = is_name and "(max_len " in rest
        if is_name:
            name = (
                prompt_field
                if name in ("prompt", "prompts", "text")
                else _API_NAMES.get(name, name)
            )
        return cls(
            400,
            f"{name}:{rest}" if is_name else message,
            param=name if is_name else None,
            code="context_length_exceeded" if is_too_long else None,
        )


def overloaded(message: str, retry_after: int = 1) -> ApiError:
    """Returns the error of a server that cannot take the request now, but perhaps in
    ``retry_after`` seconds."""
    return ApiError(
        503,
        message,
        kind="service_unavailable_error",
        code="overloaded",
        headers={"Retry-After": str(retry_after)},
    )


def engine_failed(error: object, status: int = 500) -> ApiError:
    """Returns the error for a request that failed in the engine, or for a probe of one that did."""
    return ApiError(status, str(error), kind="server_error", code="engine_error")


def endpoint_path(scope: Scope) -> str:
    """Returns the path of a request's endpoint, without the prefix at which the application is
    mounted. Whatever depends on a path depends on this one: such a prefix may have any name."""
    path, prefix = scope["path"], scope.get("root_path", "").rstrip("/")
    if prefix and (path == prefix or path.startswith(f"{prefix}/")):
        path = path[len(prefix) :]
    return path if path.startswith("/") else f"/{path}"


async def send_error(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends an error as the whole response."""
    await error.response(scope)(scope, receive, send)


def add_handlers(app: FastAPI) -> None:
    """Makes an application answer all errors in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response(request.scope)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {endpoint_path(request.scope):.200}: {error.detail}"
        failure = ApiError(error.status_code, message, headers=error.headers)
        return failure.response(request.scope)

    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> Response:
        message = "internal error; the server's log has the details"
        return ApiError(500, message, kind="server_error").response(request.scope)


def invalid_body(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Returns the error for a body that is not of the endpoint's type."""
    first = _most_specific(errors, body)
    kind, message = first["type"], first["msg"][:_MAX_LINE]
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        return ApiError(400, message, param=message.partition(":")[0].partition(".")[0])
    path = _path(first["loc"], body, is_missing=kind == "missing")
    where, param = f"{'.'.join(path):.200}", f"{''.join(path[:1]):.200}"
    if kind in ("extra_forbidden", UNKNOWN_FIELDS):
        names = ".".join([*path, message]) if kind == UNKNOWN_FIELDS else where
        first_name = names.partition(",")[0]
        message = f"Unrecognized request argument supplied: {names}"
        return ApiError(400, message, param=first_name)
    value = first.get("input")
    if kind == "union_tag_invalid":  # pydantic's message has all of a tag that may be long
        tag = _SHOWN.repr(value.get("type") if isinstance(value, dict) else value)
        expected = first["ctx"]["expected_tags"]
        message = f"input tag {tag} does not match any of the expected tags: {expected}"
    got = "none" if kind == "missing" else _SHOWN.repr(value)
    if not path:
        return ApiError(400, f"body: expected a JSON object, got {got}")
    return ApiError(400, f"{where}: {message[:1].lower()}{message[1:]}; got {got}", param=param)


def _most_specific(errors: Sequence[Mapping[str, Any]], body: Any) -> Mapping[str, Any]:
    """Returns the first error, or that of an alternative whose type the field has."""
    of_field = [error for error in errors if error["loc"][:1] == errors[0]["loc"][:1]]
    specific = [error for error in of_field if not error["type"].endswith("_type")]
    if specific:
        return specific[0]
    # The error of a list's element is more useful than the one that the list should be text.
    return max(of_field, key=lambda each: len(_path(each["loc"], body)))


def _path(location: Sequence[str | int], body: Any, *, is_missing: bool = False) -> list[str]:
    """Returns the names and indices that lead to a value of ``body``. The location of an error also
    has the alternatives of a field's type, such as ``list[int]``. If a name is missing, the last
    one is not in the body."""
    path: list[str] = []
    value: Any = body
    for i, part in enumerate(location):
        is_key = isinstance(value, dict) and part in value
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_key or is_index:
            value = value[part]  # pyright: ignore[reportCallIssue, reportArgumentType]
        elif not (is_missing and i == len(location) - 1):
            continue
        path.append(str(part))
    return path
