"""A replica on several hosts: a process on each, which form one mesh.

Ray Serve reserves a placement group for the replica with one bundle for each host, on different
nodes (STRICT_SPREAD), and starts the replica in the first one. The replica starts an actor in each
further bundle. All of them join by jax.distributed and build the same engine; that of the replica
leads, see :mod:`dsv3_jax.engine.device.processes`. If one process is lost, Ray Serve replaces the
replica.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    PlacementGroupSchedulingStrategy,
)

from dsv3_jax.cli.run_server import MadeEngine
from dsv3_jax.distributed import initialize
from dsv3_jax.engine import Follower, Leader
from dsv3_jax.serve_ray.call import EngineFailedError
from dsv3_jax.serve_ray.settings import AppSettings

STRATEGY = "STRICT_SPREAD"  # every host of a replica is another node

MakeEngine = Callable[[argparse.Namespace, Leader | Follower | None], MadeEngine]
"""Returns the engine of a process of the mesh, and what its server needs."""


def bundles(settings: AppSettings) -> list[dict[str, float]]:
    """Returns the resources of each host of a replica, as a placement group names them."""
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    bundle = {names.get(name, name): count for name, count in settings.resources.items() if count}
    return [bundle] * settings.hosts


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Returns Ray's options of an actor with these resources."""
    known = {name: resources[name] for name in resources if name in ("num_cpus", "num_gpus")}
    others = {name: resources[name] for name in resources if name not in known}
    return {**known, **({"resources": others} if others else {})}


class Hosts:
    """The processes of a replica, as the first one sees them. It starts the others."""

    def __init__(self, settings: AppSettings, make_engine: MakeEngine):
        self._settings = settings
        self._make_engine = make_engine
        address, key = ray.util.get_node_ip_address(), secrets.token_bytes(32)
        self.leader = Leader(address, settings.hosts - 1, key)
        self._coordinator = f"{address}:{_free_port()}"
        group = ray.util.get_current_placement_group()
        assert group is not None, "a deployment of several hosts has a placement group"
        follower_process: Any = ray.remote(_FollowerProcess)
        self._actors: list[Any] = [
            follower_process.options(
                **actor_options(settings.resources),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number
                ),
            ).remote()
            for number in range(1, settings.hosts)
        ]
        follower = Follower(self.leader.address, key)
        self._runs = [
            asyncio.ensure_future(
                actor.run.remote(settings, make_engine, self._coordinator, number, follower)
            )
            for number, actor in enumerate(self._actors, 1)
        ]

    async def start(self) -> MadeEngine:
        """Returns the engine that leads, when all processes have one."""

        def make() -> MadeEngine:
            initialize(self._coordinator, self._settings.hosts, 0)
            return self._make_engine(self._settings.arguments, self.leader)

        return await self._unless_one_ends(asyncio.to_thread(make))

    async def wait_until_ready(self) -> None:
        """Waits until every process has compiled its programs."""
        await self._unless_one_ends(asyncio.to_thread(self.leader.wait_for_followers))

    def check(self) -> None:
        """Raises EngineFailedError if another process ended."""
        if self.leader.is_lost or any(run.done() for run in self._runs):
            raise EngineFailedError("engine: a process of its mesh was lost")

    def close(self) -> None:
        """Ends the other processes, after the engine."""
        for actor in self._actors:
            ray.kill(actor)
        for run in self._runs:
            run.cancel()

    async def _unless_one_ends(self, work: Any) -> Any:
        task = asyncio.ensure_future(work)
        await asyncio.wait([task, *self._runs], return_when=asyncio.FIRST_COMPLETED)
        for run in self._runs:
            if run.done():
                raise EngineFailedError("engine: a process of its mesh failed") from run.exception()
        return task.result()


class _FollowerProcess:
    """An actor on a further host."""

    def run(
        self,
        settings: AppSettings,
        make_engine: MakeEngine,
        coordinator: str,
        number: int,
        follower: Follower,
    ) -> None:
        """Joins the mesh and launches what the leader launches, until it ends."""
        initialize(coordinator, settings.hosts, number)
        engine = make_engine(settings.arguments, follower).engine
        engine.warm_up()
        engine.follow()
        engine.shutdown(drain=False)


def _free_port() -> int:
    """Returns a port of this host that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
