"""/health, /ready and /version, for probes."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

import dsv3_jax
from dsv3_jax.server.errors import ApiError, overloaded
from dsv3_jax.server.frontend.remote_engine import RemoteEngine, silent
from dsv3_jax.server.service import service_of

router = APIRouter()


class Status(BaseModel):
    """Answer of a probe."""

    status: str


class Version(BaseModel):
    """Version of the server."""

    version: str


@router.get("/health")
async def health(request: Request) -> Status:
    """Returns status 200 while the engine can serve, also while it compiles, before it is ready or
    later. Returns 503 after it failed, and while one of its steps or the silence of its process
    lasts suspiciously long."""
    service = service_of(request)
    if service.failure is not None:
        raise _unhealthy(str(service.failure))
    engine, limit = service.engine, service.settings.stuck_seconds / 2
    if isinstance(engine, RemoteEngine) and (seconds := engine.silent_seconds) > limit:
        raise _unhealthy(str(silent(seconds)))
    seconds = engine.step_seconds
    if seconds > limit:
        raise _unhealthy(f"engine: a step has taken {seconds:.1f} s so far")
    return Status(status="ok")


@router.get("/ready")
async def ready(request: Request) -> Status:
    """Returns status 200 when the programs of the default options are compiled; 503 before, and
    while the server ends. A program of other options is compiled when a request first asks for
    them, and all requests wait meanwhile, with status 200 here."""
    if not service_of(request).is_ready:
        raise overloaded("server: not ready yet; try again later")
    return await health(request)


@router.get("/version")
async def version() -> Version:
    """Returns the version of dsv3_jax."""
    return Version(version=dsv3_jax.__version__)


def _unhealthy(message: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code="engine_error")
