"""Errors in OpenAI's shape, ``{"error": {"message", "type", "param", "code"}}``.

Those of /v1/messages have Anthropic's, ``{"type": "error", "error": {"type", "message"}}``.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

# Names of an engine's settings that have another name in the API.
_API_NAMES = {"max_new_tokens": "max_tokens", "stop_tokens": "stop_token_ids"}

_SHOWN = reprlib.Repr()
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
    """An error that the client sees.

    Args:
      status: HTTP status.
      message: one line.
      kind: OpenAI's type of the error.
      param: field of the body that caused it.
      code: OpenAI's code, for programs.
      headers: further headers of the response.
    """

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
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        line = " ".join(message.split())
        self.body = ErrorBody(error=ErrorDetail(message=line, type=kind, param=param, code=code))

    @property
    def messages_body(self) -> MessagesErrorBody:
        """The error in the shape of Anthropic's API."""
        kind = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _MESSAGES_TYPES.get(self.status, kind)
        detail = MessagesErrorDetail(type=kind, message=self.body.error.message)
        return MessagesErrorBody(error=detail)

    def response(self, path: str) -> Response:
        """Returns the response to a request for ``path``, which decides on the shape."""
        body = self.messages_body if path.startswith("/v1/messages") else self.body
        return JSONResponse(body.model_dump(), self.status, self.headers)

    @classmethod
    def of_engine(cls, error: ValueError, prompt_field: str) -> ApiError:
        """Returns the error for a setting or prompt that the engine refused.

        Args:
          error: its message begins with the setting's name.
          prompt_field: name of the prompt in the body.
        """
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
    """Returns the error of a server that cannot take the request now.

    Args:
      retry_after: seconds after which the client should try again.
    """
    return ApiError(
        503,
        message,
        kind="service_unavailable_error",
        code="overloaded",
        headers={"Retry-After": str(retry_after)},
    )


def engine_failed(error: BaseException) -> ApiError:
    """Returns the error for a request that failed in the engine."""
    return ApiError(500, str(error), kind="server_error", code="engine_error")


async def send_error(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends an error as the whole response."""
    await error.response(scope["path"])(scope, receive, send)


def add_handlers(app: FastAPI) -> None:
    """Makes an application answer all errors in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response(request.url.path)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _invalid(error.errors()).response(request.url.path)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        failure = ApiError(error.status_code, message, headers=error.headers)
        return failure.response(request.url.path)

    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> Response:
        message = "internal error; the server's log has the details"
        return ApiError(500, message, kind="server_error").response(request.url.path)


def _invalid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Returns the error for a body that is not of the endpoint's type."""
    first = _most_specific(errors)
    path = list(first["loc"][1:])  # without "body"
    kind, message = first["type"], first["msg"]
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", message)
        return ApiError(400, f"body: expected JSON: {reason}")
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        return ApiError(400, message, param=message.partition(":")[0].partition(".")[0])
    if not path:
        message = f"body: expected a JSON object of type application/json: {message}"
        return ApiError(400, message)
    # The path also has the alternatives of a field's type, such as list[int].
    parts = [str(part) for part in path if _is_field(part)]
    param = ".".join(parts[:1])
    where = ".".join(parts)
    if kind == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {where:.200}", param=where)
    got = "none" if kind == "missing" else _SHOWN.repr(first.get("input"))
    return ApiError(400, f"{where}: {message[:1].lower()}{message[1:]}; got {got}", param=param)


def _most_specific(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the first error, or that of an alternative whose type the field has."""
    of_field = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    specific = [error for error in of_field if not error["type"].endswith("_type")]
    return (specific or of_field)[0]


def _is_field(part: object) -> bool:
    return isinstance(part, int) or (
        part != "str" and "[" not in str(part) and "-" not in str(part)
    )
