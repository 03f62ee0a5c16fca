"""Replicas: an actor with an engine and the application of ``dsv3 serve``.

A prefill replica gives cache pages to decode replicas by HTTP. It takes no calls through Ray Serve
except those for its address, figures and health. Pages do not travel through Ray: decode replicas
connect to its own port, as decode servers do without Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import dataclasses
import os
import secrets
from collections.abc import AsyncIterator, Iterator

import ray  # pyright: ignore[reportMissingImports]
import uvicorn
from fastapi import FastAPI
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from ray.serve.exceptions import RayServeException  # pyright: ignore[reportMissingImports]
from ray.serve.handle import DeploymentHandle  # pyright: ignore[reportMissingImports]
from starlette.types import Message

from dsv3_jax.cli import allocator
from dsv3_jax.cli.run_server import MadeEngine, make_engine, sender_of
from dsv3_jax.disaggregation.peers import PrefillAddress, keep_current
from dsv3_jax.disaggregation.protocol import Sender
from dsv3_jax.engine import Follower, Leader
from dsv3_jax.serve_ray.autoscaling import CACHE_USAGE, OPEN_REQUESTS
from dsv3_jax.serve_ray.call import Call, EngineFailedError, answer
from dsv3_jax.serve_ray.front_process import results_of
from dsv3_jax.serve_ray.hosts import Hosts
from dsv3_jax.serve_ray.settings import AppSettings
from dsv3_jax.server.app import create_app
from dsv3_jax.server.middleware import ApiKeys
from dsv3_jax.server.run import Watchdog, bind
from dsv3_jax.server.service import Service

_ENDING_SECONDS = 5  # in which a failed engine's requests get their errors


class Replica:
    """The parts that replicas of all roles have: an engine, the application of ``dsv3 serve``, and
    answers to Ray Serve's questions."""

    app: FastAPI
    service: Service
    closing: contextlib.AsyncExitStack  # the parts that end with the replica, the last one first

    async def start(
        self, made: MadeEngine, *, sender: Sender | None = None, hosts: Hosts | None = None
    ) -> None:
        """Starts the application, and returns when the programs of the default options
        are compiled."""
        self.id = serve.get_replica_context().replica_id.unique_id
        self.app = create_app(
            made.engine, made.tokenizer, made.settings, sender=sender, remote=made.remote
        )
        self.service = self.app.state.service
        self.closing = contextlib.AsyncExitStack()
        if hosts is not None:
            self.closing.callback(hosts.close)  # after the engine, whose steps need them
        if made.remote is not None:
            self.closing.callback(made.remote.close)  # after the engine
        await self.closing.enter_async_context(self.app.router.lifespan_context(self.app))
        self.closing.enter_context(
            Watchdog(self.service, self._stop, lambda: os._exit(1), _ENDING_SECONDS)
        )
        while not self.service.is_ready:
            self.check()
            await asyncio.sleep(0.05)

    @staticmethod
    def make_engine(
        arguments: argparse.Namespace, process: Leader | Follower | None = None
    ) -> MadeEngine:
        """Returns the engine and what its server needs."""
        allocator.configure("serve")  # as the command does
        return make_engine(arguments, process=process)

    async def metrics(self) -> tuple[str, str]:
        """Returns the replica's id and its figures in Prometheus' text format."""
        text = await self.service.in_thread(self.service.metrics.text, "calls")
        return self.id, text.decode()

    async def check_health(self) -> None:
        """Raises if the engine failed, or its device seems to be stuck. Ray Serve then replaces
        the replica."""
        self.check()
        seconds, limit = self.service.engine.step_seconds, self.service.settings.stuck_seconds
        if seconds > limit / 2:
            raise EngineFailedError(f"engine: a step has taken {seconds:.1f} s so far")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the figures that the autoscaling policy reads."""
        stats = await self.service.in_thread(self.service.engine.stats, "calls")
        return {CACHE_USAGE: stats.cache_usage}

    async def __del__(self) -> None:
        if hasattr(self, "closing"):
            await self.closing.aclose()

    def check(self) -> None:
        """Raises EngineFailedError if the engine failed."""
        if self.service.failure is not None:
            raise EngineFailedError(str(self.service.failure))

    def _stop(self) -> None:
        """Is called when the engine failed. New calls get an error, which sends them elsewhere."""
        self.service.is_ready = False


class EngineReplica(Replica):
    """Serves calls with an engine. Ray Serve sends it calls once its constructor has returned, and
    when it is to end, waits for open calls before it deletes it."""

    async def __init__(self, settings: AppSettings, prefill: DeploymentHandle | None = None):
        self._looking: asyncio.Task[None] | None = None
        if settings.hosts == 1:
            self._hosts = None
            made = await asyncio.to_thread(self.make_engine, settings.arguments)
            await self.start(made)
        else:
            self._hosts = Hosts(settings, type(self).make_engine)
            made = await self._hosts.start()
            await self.start(made, hosts=self._hosts)
            await self._hosts.wait_until_ready()
        if prefill is not None:
            assert made.remote is not None, "the role is decode"
            self._looking = asyncio.create_task(
                keep_current(
                    made.remote.peers,
                    lambda: results_of(prefill, "address"),
                    (TimeoutError, RayError, RayServeException),
                )
            )
            self.closing.callback(self._looking.cancel)

    def check(self) -> None:
        """Raises EngineFailedError if the engine failed, or another process of its mesh, or if
        the search for prefill replicas ended."""
        super().check()
        looking = self._looking
        if looking is not None and looking.done() and not looking.cancelled():
            error = looking.exception()
            raise EngineFailedError("engine: nothing looks for prefill replicas") from error
        if self._hosts is not None:
            self._hosts.check()

    async def respond(self, call: Call) -> AsyncIterator[list[Message]]:
        """Yields the messages of the response to a call. Raises EngineFailedError if the engine
        failed, and nothing was yielded before."""
        has_begun = False
        async with contextlib.aclosing(answer(self.app, call, self.id)) as batches:
            async for batch in batches:
                if not has_begun and batch[0]["status"] >= 500:
                    self.check()
                has_begun = True
                yield batch


class PrefillReplica(Replica):
    """Computes cache pages for decode replicas."""

    async def __init__(self, settings: AppSettings):
        arguments = copy.copy(settings.prefill_arguments)
        arguments.host = ray.util.get_node_ip_address()
        bound = bind(arguments.host, 0)
        sender = sender_of(arguments)
        made = await asyncio.to_thread(self.make_engine, arguments)
        key = secrets.token_urlsafe(32)
        # The front has checked the keys of clients. This one keeps all others from the port.
        made = made._replace(settings=dataclasses.replace(made.settings, api_keys=ApiKeys([key])))
        await self.start(made, sender=sender)
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        self._address = PrefillAddress(f"http://{host}:{bound.getsockname()[1]}", key)
        config = uvicorn.Config(
            self.app,
            access_log=False,
            log_config=None,
            lifespan="off",  # :meth:`start` has begun it
            timeout_graceful_shutdown=int(arguments.drain_seconds),
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]))
        # Before the application ends.
        self.closing.push_async_callback(self._end_server)

    async def address(self) -> PrefillAddress:
        """Returns where decode replicas can reach it."""
        self.check()
        return self._address

    async def check_health(self) -> None:
        """Raises if the engine failed, or its port is closed, see :meth:`Replica.check_health`."""
        if self._serving.done():
            self._serving.result()
            raise ConnectionError("prefill: the port was closed")
        await super().check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the figures that the autoscaling policy reads, with the open prompts, which Ray
        Serve does not see."""
        figures = await super().record_autoscaling_stats()
        return {**figures, OPEN_REQUESTS: float(self.service.admission.open)}

    async def _end_server(self) -> None:
        self._server.should_exit = True
        await self._serving


class _Server(uvicorn.Server):
    """A server that leaves signals to Ray."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
