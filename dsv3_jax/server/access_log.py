"""The access log: one line of JSON for every request, without prompts, texts or keys."""

from __future__ import annotations

import datetime
import json
import logging
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)


class AccessLog:
    """ASGI middleware that logs every request when its response has ended.

    The response has the request's id in the header X-Request-Id. Endpoints add fields to
    ``request.state.log``.
    """

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
                "path": scope["path"],
                "status": status,
                "ms": round(1e3 * (time.monotonic() - began), 1),
                **fields,
            }
            logger.info("%s", json.dumps(line))
