"""The application: middleware, endpoints, start and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from fastapi import FastAPI

import dsv3_jax
from dsv3_jax.engine import Engine
from dsv3_jax.server import health, metrics
from dsv3_jax.server.access_log import AccessLog
from dsv3_jax.server.anthropic import messages
from dsv3_jax.server.api_keys import ApiKeyCheck
from dsv3_jax.server.body_limit import BodyLimit
from dsv3_jax.server.errors import ErrorBody, add_handlers
from dsv3_jax.server.frontend.remote_engine import RemoteEngine
from dsv3_jax.server.openai import chat, completions, models, responses, tokens
from dsv3_jax.server.page import drafts, routes
from dsv3_jax.server.service import Service
from dsv3_jax.server.settings import ServerSettings
from dsv3_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def create_app(
    engine: Engine | RemoteEngine, tokenizer: Tokenizer, settings: ServerSettings
) -> FastAPI:
    """Returns the application of a server.

    It compiles the engine's programs when it starts, and shuts the engine down when it ends.

    Args:
      engine: runs in a thread of its own, or in another process.
      tokenizer: the model's.
    """
    service = Service(engine, tokenizer, settings)
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
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Compiles while the server answers probes, and closes the engine at the end."""
    service: Service = app.state.service
    warm_up = asyncio.create_task(service.warm_up())
    try:
        yield
    finally:
        service.is_ready = False
        warm_up.cancel()
        await asyncio.gather(warm_up, return_exceptions=True)
        await service.close()
