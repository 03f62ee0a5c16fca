"""The parts of a replica: their ends, and its health."""

from __future__ import annotations

import pytest

from tests.serve_ray.scripts import result_of

CODE = """
import asyncio, contextlib, json
from types import SimpleNamespace
from unittest import mock
from dsv3_jax.serve_ray import replica

ended = []

@contextlib.asynccontextmanager
async def lifespan(app):
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
source = SimpleNamespace(close=lambda: ended.append("source of pages"))
made = SimpleNamespace(engine=None, tokenizer=None, settings=None, remote=source)
hosts = SimpleNamespace(close=lambda: ended.append("other processes"))

async def run():
    with (
        mock.patch.object(replica, "create_app", lambda *arguments, **options: app),
        mock.patch.object(replica.serve, "get_replica_context", lambda: context),
    ):
        parts = replica.Replica()
        await parts.start(made, hosts=hosts)
        await parts.closing.aclose()

async def fail():
    raise ValueError("not Ray's")

async def look():
    parts = object.__new__(replica.EngineReplica)
    parts.service, parts._hosts = service, None
    parts._looking = asyncio.create_task(fail())
    parts.check()
    await asyncio.wait([parts._looking])
    try:
        parts.check()
    except replica.EngineFailedError as error:
        return repr(error.__cause__)

asyncio.run(run())
print(json.dumps({"ended": ended, "cause": asyncio.run(look())}))
"""


@pytest.mark.slow
def test_ends_and_health():
    result = result_of(CODE, JAX_PLATFORMS="cpu")
    assert result["ended"] == ["engine", "source of pages", "other processes"]
    assert result["cause"] == 'ValueError("not Ray\'s")', "and the health check fails"
