"""/health, /ready and /version, for probes."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

import dsv3_jax
from dsv3_jax.server.errors import engine_failed, overloaded
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
    """Returns status 200 while the engine can serve, also while it compiles."""
    failure = service_of(request).failure
    if failure is not None:
        raise engine_failed(failure)
    return Status(status="ok")


@router.get("/ready")
async def ready(request: Request) -> Status:
    """Returns status 200 when all programs are compiled, and 503 before and while draining."""
    if not service_of(request).is_ready:
        raise overloaded("server: not ready yet; try again later")
    return await health(request)


@router.get("/version")
async def version() -> Version:
    """Returns the version of dsv3_jax."""
    return Version(version=dsv3_jax.__version__)
