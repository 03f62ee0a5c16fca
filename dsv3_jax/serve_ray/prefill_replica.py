"""A prefill replica: an actor with an engine, which gives cache pages to decode replicas by HTTP.

It takes no calls through Ray Serve except those for its address, figures and health. Pages do not
travel through Ray: decode replicas connect to its own port, as decode servers do without Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import secrets
from collections.abc import Iterator

import ray  # pyright: ignore[reportMissingImports]
import uvicorn

from dsv3_jax.cli.run_server import sender_of
from dsv3_jax.serve_ray.autoscaling import OPEN_REQUESTS
from dsv3_jax.serve_ray.prefill_peers import PrefillAddress
from dsv3_jax.serve_ray.replica import Replica
from dsv3_jax.serve_ray.settings import AppSettings
from dsv3_jax.server.api_keys import ApiKeys
from dsv3_jax.server.run import bind


class PrefillReplica(Replica):
    """Computes cache pages for decode replicas.

    Args:
      settings: of the application, with a prefill pool.
    """

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
