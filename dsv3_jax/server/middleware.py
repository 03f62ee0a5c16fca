"""API keys, and limits of the bodies of requests: the middleware before all endpoints."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsv3_jax.server.errors import ApiError, endpoint_path, send_error
from dsv3_jax.server.page.routes import FILE_PATHS

OPEN_PATHS = frozenset(("/", "/health", "/ready", "/version", "/metrics", *FILE_PATHS))
"""Paths that need no key, for probes, monitoring and the page. A client's key is not compared with
a beginning of a path, which could be that of another endpoint."""


class ApiKeys:
    """A set of keys. Comparing takes the same time for every wrong key."""

    def __init__(self, keys: Iterable[str]):
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        return cls(read_keys(path))

    def has(self, key: str) -> bool:
        digest = _digest(key)
        # All keys are compared, so that the time does not depend on which one it is.
        return sum([hmac.compare_digest(digest, each) for each in self._digests]) > 0


def read_keys(path: Path) -> list[str]:
    """Reads a file with one key on each line. Empty lines and lines with ``#`` are skipped. Raises
    ValueError if there is no key."""
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except UnicodeDecodeError:
        raise ValueError(f"{path}: expected UTF-8 text with one API key on each line") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{path}: expected one API key on each line, got none")
    return keys


class ApiKeyCheck:
    """ASGI middleware that answers requests without a valid key with status 401, before their
    bodies are read. Keys are sent as ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``."""

    def __init__(self, app: ASGIApp, keys: ApiKeys):
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] == "lifespan" or endpoint_path(scope) in OPEN_PATHS
        if is_open or self._keys.has(_key(Headers(scope=scope))):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "API key: expected a valid one in the header Authorization: Bearer KEY",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await send_error(error, scope, receive, send)


def _key(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


# Many clients read no answer before they have sent their whole body. So much more of a body that is
# too large is read and discarded before the answer.
_DISCARDED_BYTES = 16 * 2**20


class BodyLimit:
    """ASGI middleware that reads a request's body before the application sees the request. Bodies
    that are larger get status 413, and those that take longer 408."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float):
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(scope, receive)
        except ApiError as error:
            await send_error(error, scope, receive, send)
            return
        except TimeoutError:
            error = ApiError(408, f"body: expected all of it within {self._seconds} s")
            error.headers["Connection"] = "close"
            await send_error(error, scope, receive, send)
            return
        if body is None:
            return  # the client has gone away
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        del body  # it lives as long as the application needs it, and not until the answer ends

        async def receive_again() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, receive_again, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Returns the body, or None if the client goes away."""
        length = Headers(scope=scope).get("content-length", "")
        # Compared by its number of digits first, as Python refuses to convert very long numbers.
        most = self._max_bytes + _DISCARDED_BYTES
        if length.isdecimal() and (len(length) > 18 or int(length) > most):
            raise self._too_large(length)
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            is_too_large, is_last = size > self._max_bytes, not message.get("more_body", False)
            if is_too_large:
                parts.clear()
            else:
                parts.append(part)
            if is_too_large and (is_last or size > most):
                raise self._too_large(str(size))
            if is_last:
                return b"".join(parts)

    def _too_large(self, size: str) -> ApiError:
        return ApiError(
            413,
            f"body: expected at most {self._max_bytes} bytes, got {size:.40}",
            headers={"Connection": "close"},
        )
