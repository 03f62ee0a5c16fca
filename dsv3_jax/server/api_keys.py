"""API keys: who may send requests."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

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
        """Reads keys from a file, see :func:`read_keys`."""
        return cls(read_keys(path))

    def has(self, key: str) -> bool:
        """Returns whether ``key`` is one of the keys."""
        digest = _digest(key)
        # All keys are compared, so that the time does not depend on which one it is.
        return sum([hmac.compare_digest(digest, each) for each in self._digests]) > 0


def read_keys(path: Path) -> list[str]:
    """Reads a file with one key on each line. Empty lines and lines with ``#`` are skipped.

    Raises:
      ValueError: the file has no key, or is not UTF-8.
      OSError: it cannot be read.
    """
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
    bodies are read.

    Args:
      keys: the valid keys. They are sent as ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``.
    """

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
