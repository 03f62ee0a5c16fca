"""Routers of other projects, unmodified, in front of two servers."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import openai
import pytest

from tests.server.conftest import RunningServer, demo_engine, running

ROUTERS = {
    "smg": ("smg", ["-m", "smg", "launch", "--disable-tokenizer-autoload"]),
    "vllm-router": ("vllm_router", ["-m", "vllm_router.launch_router"]),
}
"""Module and command of each router."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RunningServer]]:
    if not any(importlib.util.find_spec(module) for module, _ in ROUTERS.values()):
        pytest.skip(f"needs one of the packages {', '.join(ROUTERS)}, of the extra clients")
    with running(*demo_engine()) as one, running(*demo_engine()) as other:
        yield [one, other]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def routing(
    name: str, servers: list[RunningServer]
) -> Iterator[tuple[RunningServer, RunningServer]]:
    """Starts a router. Yields its port for requests and the one with its figures."""
    port, figures = free_port(), free_port()
    flags = {
        "--policy": "round_robin",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--prometheus-host": "127.0.0.1",
        "--prometheus-port": str(figures),
    }
    words = [word for pair in flags.items() for word in pair]
    urls = [server.url for server in servers]
    process = subprocess.Popen(
        [sys.executable, *ROUTERS[name][1], *words, "--worker-urls", *urls],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
    )
    none: dict = {"service": None, "loop": None}
    router = RunningServer(port, **none)
    try:
        for _ in range(300):
            assert process.poll() is None
            with contextlib.suppress(OSError):
                status, _, body = router.request("GET", "/readiness")
                if status == 200 and json.loads(body)["healthy_workers"] == len(servers):
                    break
            time.sleep(0.1)
        else:
            raise AssertionError("the router finds its servers not ready")
        yield router, RunningServer(figures, **none)
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_serves_the_api(servers, name):
    pytest.importorskip(ROUTERS[name][0], reason=f"needs the package {name}: pip install {name}")
    before = [server.engine.stats().prompt_tokens for server in servers]
    messages = [{"role": "user", "content": "def f("}]
    with routing(name, servers) as (router, figures):
        client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["demo"]
        settings = {"model": "demo", "messages": messages, "seed": 1}
        whole = client.chat.completions.create(max_tokens=8, **settings)  # pyright: ignore
        stream = client.chat.completions.create(max_tokens=8, stream=True, **settings)  # pyright: ignore
        pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        assert whole.usage.completion_tokens == 8
        completion = client.completions.create(model="demo", prompt="def f(", max_tokens=4)
        assert completion.choices[0].finish_reason == "length"
        answer = client.responses.create(model="demo", input="def f(", max_output_tokens=4)
        assert answer.output_text
        message = {"model": "demo", "messages": messages, "max_tokens": 4}
        assert router.post("/v1/messages", message)["stop_reason"] == "max_tokens"
        for fields in ({"temperature": 3}, {"model": "other"}):
            status = router.request("POST", "/v1/chat/completions", {**message, **fields})[0]
            assert status in (400, 404)
        assert router.request("GET", "/health")[0] == 200
        assert figures.request("GET", "/metrics")[0] == 200
    for server, tokens in zip(servers, before, strict=True):
        server.wait_until_idle()
        assert server.engine.stats().prompt_tokens > tokens
