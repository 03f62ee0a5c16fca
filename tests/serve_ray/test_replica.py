"""The order in which the parts of a replica end."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from dsv3_jax.serve_ray import replica


class Parts(replica.Replica):
    def __del__(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Does nothing: the test ends the parts."""


def test_the_other_processes_of_a_mesh_end_after_the_engine(monkeypatch):
    ended = []

    @contextlib.asynccontextmanager
    async def lifespan(app: Any):
        yield
        ended.append("engine")

    service = SimpleNamespace(
        is_ready=True,
        failure=None,
        settings=SimpleNamespace(stuck_seconds=100.0),
        engine=SimpleNamespace(fail_if_stuck=lambda seconds: None),
    )
    app = SimpleNamespace(
        state=SimpleNamespace(service=service), router=SimpleNamespace(lifespan_context=lifespan)
    )
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r0"))
    monkeypatch.setattr(replica, "create_app", lambda *arguments, **options: app)
    monkeypatch.setattr(replica.serve, "get_replica_context", lambda: context)
    made: Any = SimpleNamespace(
        engine=None,
        tokenizer=None,
        settings=None,
        remote=SimpleNamespace(close=lambda: ended.append("source of pages")),
    )
    hosts: Any = SimpleNamespace(close=lambda: ended.append("other processes"))

    async def run() -> None:
        parts = Parts()
        await parts.start(made, hosts=hosts)
        await parts.closing.aclose()

    asyncio.run(run())
    assert ended == ["engine", "source of pages", "other processes"]
