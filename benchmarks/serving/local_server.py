"""Servers of an engine in this process, for benchmarks."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import uvicorn

from dsv3_jax.engine import Engine
from dsv3_jax.server.app import create_app
from dsv3_jax.server.frontend.process import HttpProcess
from dsv3_jax.server.run import bind
from dsv3_jax.server.service import Service
from dsv3_jax.server.settings import ServerSettings
from dsv3_jax.tokenizer import Tokenizer


@contextlib.contextmanager
def serving_in_a_process(
    engine: Engine, tokenizer: Tokenizer, model_name: str, *, max_requests: int, max_len: int
) -> Iterator[str]:
    """Serves an engine of this process from another one, as ``dsv3 serve`` does. Yields the URL."""
    settings = ServerSettings(model_name, max_len, max_requests)
    with bind("127.0.0.1", 0) as bound, HttpProcess(engine, tokenizer, settings, bound) as http:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        while True:
            try:
                with urllib.request.urlopen(f"{url}/ready"):
                    break
            except urllib.error.HTTPError as error:
                error.close()
                if error.code != 503 or engine.failure is not None:
                    raise
            except urllib.error.URLError:  # it does not listen yet
                if not http.is_alive:
                    raise
            time.sleep(0.05)
        yield url


@contextlib.contextmanager
def serving(
    engine: Engine, tokenizer: Tokenizer, model_name: str, *, max_requests: int, max_len: int
) -> Iterator[str]:
    """Serves an engine from a thread of its process, as ``dsv3 serve --one-process`` does. Yields
    the URL."""
    app = create_app(engine, tokenizer, ServerSettings(model_name, max_len, max_requests))
    service: Service = app.state.service
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    with bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            while not service.is_ready:
                if service.failure is not None:
                    raise service.failure
                time.sleep(0.01)
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
