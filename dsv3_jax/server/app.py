"""The application: middleware, endpoints, start and end; /health, /ready and /version."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel

import dsv3_jax
from dsv3_jax.disaggregation.protocol import Sender
from dsv3_jax.disaggregation.remote_prefill import RemotePrefill
from dsv3_jax.engine import Engine
from dsv3_jax.server import metrics, prefill
from dsv3_jax.server.access_log import AccessLog
from dsv3_jax.server.anthropic import messages
from dsv3_jax.server.errors import ErrorBody, add_handlers, engine_failed, overloaded
from dsv3_jax.server.frontend.remote_engine import RemoteEngine, silent
from dsv3_jax.server.metrics import DecodeFigures
from dsv3_jax.server.middleware import ApiKeyCheck, BodyLimit
from dsv3_jax.server.openai import chat, completions, models, responses, tokens
from dsv3_jax.server.page import drafts, routes
from dsv3_jax.server.service import ServerSettings, Service, service_of
from dsv3_jax.tokenizer import Tokenizer


def create_app(
    engine: Engine | RemoteEngine,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    *,
    sender: Sender | None = None,
    remote: RemotePrefill | None = None,
) -> FastAPI:
    """Returns the application of a server, which compiles the engine's programs when it starts, and
    shuts the engine down when it ends. ``sender`` of a prefill server gives pages to decode
    servers, and ``remote`` of a decode server asks for them; such a server has its engine in this
    process."""
    service = Service(
        engine, tokenizer, settings, remote=remote, is_prefill_server=sender is not None
    )
    app = FastAPI(
        title="dsv3_jax",
        version=dsv3_jax.__version__,
        lifespan=_lifespan,
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    app.state.service = service
    add_handlers(app)
    # The last one added sees a request first.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, seconds=settings.body_seconds)
    if settings.api_keys is not None:
        app.add_middleware(ApiKeyCheck, keys=settings.api_keys)
    app.add_middleware(AccessLog)
    app.include_router(router)
    endpoints = (completions, chat, responses, messages, models, tokens)
    for module in (metrics, *endpoints, drafts, routes):
        app.include_router(module.router)
    if sender is not None:
        app.state.prefills = prefills = prefill.Prefills(service, sender)
        app.include_router(prefill.router)
        service.metrics.add(prefill.PrefillFigures(prefills.counts, settings.model_name))
    if remote is not None:
        service.metrics.add(DecodeFigures(remote, settings.model_name))
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Compiles while the server answers probes, and closes the engine at the end."""
    service: Service = app.state.service
    if isinstance(service.engine, RemoteEngine):
        service.engine.deliver_in(asyncio.get_running_loop())
    warm_up = asyncio.create_task(service.warm_up())
    try:
        yield
    finally:
        service.is_ready = False
        warm_up.cancel()
        await asyncio.gather(warm_up, return_exceptions=True)
        await service.close()


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
        raise engine_failed(service.failure, 503)
    engine, limit = service.engine, service.settings.stuck_seconds / 2
    if isinstance(engine, RemoteEngine) and (seconds := engine.silent_seconds) > limit:
        raise engine_failed(silent(seconds), 503)
    seconds = engine.step_seconds
    if seconds > limit:
        raise engine_failed(f"engine: a step has taken {seconds:.1f} s so far", 503)
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
