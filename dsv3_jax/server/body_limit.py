"""Limits of request bodies: their size, and the time in which they arrive."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsv3_jax.server.errors import ApiError, send_error

# Many clients read no answer before they have sent their whole body. So much more of a body that is
# too large is read and discarded before the answer.
_DISCARDED_BYTES = 16 * 2**20


class BodyLimit:
    """ASGI middleware that reads a request's body before the application sees the request.

    Args:
      max_bytes: larger bodies get status 413.
      seconds: bodies that take longer get status 408.
    """

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
