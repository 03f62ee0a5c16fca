"""The application: middleware, endpoints, start and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from fastapi import FastAPI

import dsv3_jax
from dsv3_jax.disaggregation.protocol import Sender
from dsv3_jax.disaggregation.remote_prefill import RemotePrefill
from dsv3_jax.engine import Engine
from dsv3_jax.server import health, metrics, prefill
from dsv3_jax.server.access_log import AccessLog
from dsv3_jax.server.anthropic import messages
from dsv3_jax.server.api_keys import ApiKeyCheck
from dsv3_jax.server.body_limit import BodyLimit
from dsv3_jax.server.errors import ErrorBody, add_handlers
from dsv3_jax.server.frontend.remote_engine import RemoteEngine
from dsv3_jax.server.metrics import DecodeFigures
from dsv3_jax.server.openai import chat, completions, models, responses, tokens
from dsv3_jax.server.page import drafts, routes
from dsv3_jax.server.service import Service
from dsv3_jax.server.settings import ServerSettings
from dsv3_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def create_app(
    engine: Engine | RemoteEngine,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    *,
    sender: Sender | None = None,
    remote: RemotePrefill | None = None,
) -> FastAPI:
    """Returns the application of a server.

    It compiles the engine's programs when it starts, and shuts the engine down when it ends.

    Args:
      engine: runs in a thread of its own, or in another process, but not with the last two.
      tokenizer: the model's.
      sender: gives pages to decode servers; None if this is no prefill server.
      remote: the engine's source of pages on prefill servers, or None.
    """
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
    endpoints = (completions, chat, responses, messages, models, tokens)
    for module in (health, metrics, *endpoints, drafts, routes):
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
