"""Limits and names of a server."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.server.middleware import ApiKeys


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Limits and names of a server."""

    model_name: str
    """The id of the model in the API."""
    max_len: int
    """Most tokens of a prompt and its completion together; the engine's."""
    max_requests: int
    """Most completions that run or wait at a time. More are refused with status 503."""
    page_size: int = DEFAULT_PAGE_SIZE
    """Tokens of a cache page; the engine's."""
    max_body_bytes: int = 4 * 2**20
    """Largest body of an HTTP request."""
    header_seconds: float = 30.0
    """Longest time of a connection without a complete header of a request."""
    body_seconds: float = 30.0
    """Longest time in which a body must have arrived."""
    request_seconds: float | None = None
    """Longest time of a completion, from its arrival to its end. None for no limit."""
    unread_seconds: float = 600.0
    """Longest time in which a client takes nothing of what is sent to it. After it the connection
    is closed, and its requests are cancelled."""
    drain_seconds: float = 30.0
    """Longest time that open requests get to finish when the server ends."""
    stuck_seconds: float = 300.0
    """Longest time of an engine's step, without compilations, and of the silence of an engine in
    another process. After it the device counts as stuck, or the process as frozen, and the server
    ends. From half of it on, /health returns status 503."""
    api_keys: ApiKeys | None = None
    """Keys that clients must have; None for no keys."""
    program_store: Path | None = None
    """Directory of :meth:`Engine.warm_up`; None compiles programs at every start."""
    log_level: str = "info"
    """Least level of lines on stderr. Requests are logged as information, and those of probes for
    debugging."""
