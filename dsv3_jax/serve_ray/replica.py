"""A replica: an actor with an engine and the application of ``dsv3 serve``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

from ray import serve  # pyright: ignore[reportMissingImports]
from starlette.types import Message

from dsv3_jax.cli.run_server import MadeEngine, make_engine
from dsv3_jax.cli.serve import depth_of, draft_of
from dsv3_jax.serve_ray.autoscaling import CACHE_USAGE
from dsv3_jax.serve_ray.call import Call, EngineFailedError, answer
from dsv3_jax.serve_ray.settings import AppSettings
from dsv3_jax.server.app import create_app
from dsv3_jax.server.service import Service
from dsv3_jax.server.watchdog import Watchdog

_ENDING_SECONDS = 5
"""Time in which a failed engine's requests get their errors before the process ends."""


class EngineReplica:
    """Serves calls with an engine. Ray Serve sends it calls once its constructor has returned, and
    when it is to end, waits for open calls before it deletes it.

    Args:
      settings: of the application.
    """

    async def __init__(self, settings: AppSettings):
        arguments = settings.arguments
        self._id = serve.get_replica_context().replica_id.unique_id
        made = await asyncio.to_thread(self.make_engine, arguments)
        self._app = create_app(made.engine, made.tokenizer, made.settings)
        self._service: Service = self._app.state.service
        self._closing = contextlib.AsyncExitStack()
        await self._closing.enter_async_context(self._app.router.lifespan_context(self._app))
        self._closing.enter_context(
            Watchdog(self._service, self._stop, lambda: os._exit(1), _ENDING_SECONDS)
        )
        while not self._service.is_ready:
            self._check()
            await asyncio.sleep(0.05)

    def make_engine(self, arguments: argparse.Namespace) -> MadeEngine:
        """Returns the engine and what its server needs."""
        return make_engine(arguments, draft_of(arguments), depth_of(arguments))

    async def respond(self, call: Call) -> AsyncIterator[list[Message]]:
        """Yields the messages of the response to a call.

        Raises:
          EngineFailedError: the engine failed, and nothing was yielded before.
        """
        has_begun = False
        async with contextlib.aclosing(answer(self._app, call, self._id)) as batches:
            async for batch in batches:
                if not has_begun and batch[0]["status"] >= 500:
                    self._check()
                has_begun = True
                yield batch

    async def metrics(self) -> tuple[str, str]:
        """Returns the replica's id and its figures in Prometheus' text format."""
        text = await self._service.in_thread(self._service.metrics.text)
        return self._id, text.decode()

    async def check_health(self) -> None:
        """Raises if the engine failed, or its device seems to be stuck. Ray Serve then replaces
        the replica."""
        self._check()
        seconds, limit = self._service.engine.step_seconds, self._service.settings.stuck_seconds
        if seconds > limit / 2:
            raise EngineFailedError(f"engine: a step has taken {seconds:.1f} s so far")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the figures that the autoscaling policy reads."""
        stats = await self._service.in_thread(self._service.engine.stats)
        return {CACHE_USAGE: stats.cache_usage}

    async def __del__(self) -> None:
        if hasattr(self, "_closing"):
            await self._closing.aclose()

    def _check(self) -> None:
        if self._service.failure is not None:
            raise EngineFailedError(str(self._service.failure))

    def _stop(self) -> None:
        """Is called when the engine failed. New calls get an error, which sends them elsewhere."""
        self._service.is_ready = False
