"""A server in this process, with the demo's engine, shared by all tests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest
import uvicorn

import dsv3_jax
from dsv3_jax.disaggregation.protocol import Sender
from dsv3_jax.disaggregation.remote_prefill import RemotePrefill
from dsv3_jax.engine import Engine
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.server.app import create_app
from dsv3_jax.server.run import Server, bind
from dsv3_jax.server.service import Admission, ServerSettings, Service
from dsv3_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.server.scripted import ScriptedEngine

MAX_LEN = 256
MAX_RUNNING = 4
MAX_REQUESTS = 12

# Few programs: a step decodes only, or also has chunks.
BUCKETS = Buckets(decodes=(4,), chunks=(1,), chunk_tokens=32, max_steps=1).single()


@dataclasses.dataclass(frozen=True)
class RunningServer:
    """A server on loopback."""

    port: int
    service: Service
    loop: asyncio.AbstractEventLoop
    """Its event loop, which runs in a thread."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> Engine:
        return self.service.engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self.service.tokenizer

    def request(
        self,
        method: str,
        path: str,
        body: bytes | Any = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """Sends a request with any body. Returns the status, the headers and the body."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            all_headers = {"Content-Type": "application/json", **(headers or {})}
            connection.request(method, path, body, all_headers)
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return response.status, names, response.read()

    def post(self, path: str, body: Any) -> dict[str, Any]:
        """Returns the answer to a request that succeeds."""
        status, _, content = self.request("POST", path, body)
        assert status == 200, content
        return json.loads(content)

    def refused(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """Returns the status and the error of a request that is refused."""
        status, _, content = self.request("POST", path, body, headers)
        error = json.loads(content)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]
        assert len(error["message"]) < 600
        return status, error

    def tasks(self) -> int:
        """Returns the number of tasks of the event loop."""

        async def count() -> int:
            return len(asyncio.all_tasks()) - 1

        return asyncio.run_coroutine_threadsafe(count(), self.loop).result(30)

    def wait_until_idle(self) -> None:
        """Waits until no request is open, neither here nor in the engine, and no step is under way:
        a request keeps its cache pages until the last step that it is in has ended."""
        for _ in range(3000):
            stats = self.engine.stats()
            in_engine = stats.running or stats.waiting or stats.cache_usage
            if not (self.service.admission.open or in_engine):
                return
            time.sleep(0.01)
        raise AssertionError(f"open: {self.service.admission.open}, {self.engine.stats()}")

    @contextlib.contextmanager
    def limited(self, count: int) -> Iterator[None]:
        """Lets the server have at most ``count`` open completions. A completion has to be closed
        where it was opened, so that none may be open at the beginning or the end."""
        before = self.service.admission
        self.wait_until_idle()
        self.service.admission = Admission(count)
        try:
            yield
            self.wait_until_idle()
        finally:
            self.service.admission = before


@contextlib.contextmanager
def running(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    sender: Sender | None = None,
    remote: RemotePrefill | None = None,
    **settings: Any,
) -> Iterator[RunningServer]:
    """Runs a server in a thread, and waits until it is ready."""
    defaults: dict[str, Any] = {"max_len": MAX_LEN, "max_requests": MAX_REQUESTS}
    all_settings = ServerSettings("demo", **{**defaults, **settings})
    app = create_app(engine, tokenizer, all_settings, sender=sender, remote=remote)
    bound = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, log_config=None, access_log=False)
    server = Server(config, app.state.service)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=[server.serve([bound])])
    with bound, contextlib.closing(loop):
        thread.start()
        try:
            it = RunningServer(bound.getsockname()[1], app.state.service, loop)
            for _ in range(3000):
                if it.service.is_ready:
                    break
                time.sleep(0.02)
            assert it.service.is_ready
            yield it
        finally:
            server.should_exit = True
            thread.join()


def demo_engine(**settings: Any) -> tuple[Engine, Tokenizer]:
    """Returns a small engine of the demo, and its tokenizer."""
    model, tokenizer = dsv3_jax.load("demo")
    assert tokenizer is not None
    defaults: dict[str, Any] = {"max_running": MAX_RUNNING, "buckets": BUCKETS}
    return Engine(model, tokenizer, MAX_LEN, **{**defaults, **settings}), tokenizer


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """A server with one engine for all tests."""
    with running(*demo_engine()) as it:
        yield it


@pytest.fixture(scope="session")
def scripted_server(tmp_path_factory) -> Iterator[tuple[RunningServer, ScriptedEngine]]:
    """A server whose engine writes given texts, and this engine."""
    from tests.server.scripted import scripted  # which uses this module

    with scripted(tmp_path_factory.mktemp("tokenizer"), "deepseek-v3.1") as it:
        yield it


@pytest.fixture
def engine(scripted_server) -> ScriptedEngine:
    """The engine of ``scripted_server``, as new."""
    engine = scripted_server[1]
    engine.requests.clear()
    engine.finish_reason, engine.piece_tokens, engine.ids = "stop", 1, None
    return engine


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    """OpenAI's client, which does not try again."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as it:
        yield it
