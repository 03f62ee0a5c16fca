"""The access log: one line of JSON for every request, without prompts, texts or keys."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dsv3_jax.server.errors import endpoint_path
from dsv3_jax.words import escaped, one_line

logger = logging.getLogger(__name__)

_PROBES = ("/health", "/ready", "/metrics", "/version")
"""Paths that other programs ask for every few seconds."""

_MAX_PATH = 500  # characters
_MAX_LINE = 2000


class AccessLog:
    """ASGI middleware that logs every request when its response has ended, with fields that
    endpoints add to ``request.state.log``. The response has the request's id in the header
    X-Request-Id."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        request_id = uuid.uuid4().hex
        fields: dict[str, Any] = {}
        scope.setdefault("state", {})["log"] = fields
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            client = scope.get("client")
            line = {
                "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
                "request_id": request_id,
                "client": client[0] if client else None,
                "method": scope["method"],
                "path": scope["path"][:_MAX_PATH],
                "status": status,
                "ms": round(1e3 * (time.monotonic() - began), 1),
                **fields,
            }
            level = logging.DEBUG if endpoint_path(scope) in _PROBES else logging.INFO
            logger.log(level, "%s", json.dumps(line))


@contextlib.contextmanager
def log_to_stderr(level: str) -> Iterator[None]:
    """Writes the server's log and the access log on stderr during the body, unless another one
    does."""
    if any(isinstance(handler, _Stderr) for handler in logger.handlers):
        yield
        return
    messages, lines = _Stderr(), _Stderr()
    messages.setFormatter(LineFormatter("dsv3: %(message)s"))
    handlers = {"dsv3_jax": messages, "uvicorn.error": messages, logger.name: lines}
    loggers = {logging.getLogger(name): handler for name, handler in handlers.items()}
    before = {each: (each.level, each.propagate) for each in loggers}
    for each, handler in loggers.items():
        each.addHandler(handler)
        each.setLevel(level.upper())
    logger.propagate = False
    try:
        yield
    finally:
        for each, handler in loggers.items():
            each.removeHandler(handler)
            each.level, each.propagate = before[each]


class LineFormatter(logging.Formatter):
    """Formats a record as one line, however much of it is text of clients and peers, so that they
    can neither write lines of their own nor control a terminal. A traceback follows."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return one_line(super().formatMessage(record), _MAX_LINE)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(map(escaped, super().formatException(ei).splitlines()))


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes on what is stderr at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
