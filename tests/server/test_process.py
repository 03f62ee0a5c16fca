"""``dsv3 serve`` as a process: start, draining, keys, limits; and its errors."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from dsv3_jax.cli import flags, loading
from dsv3_jax.cli.main import main, parser
from dsv3_jax.server import access_log
from dsv3_jax.server.middleware import ApiKeys
from tests.server.conftest import RunningServer, demo_engine, running
from tests.server.processes import ServerProcess

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "--port: expected a port from 0 to 65535, got 70000"),
        (
            ["--activations", "float8"],
            "--activations: expected --quantization fp8 or int4 with it, got none",
        ),
        (["--max-running", "0"], "--max-running: expected an integer of at least 1, got 0"),
        (["--draft", "medusa"], "draft: expected None, 'mtp', 'ngram'"),
        (["--request-seconds", "nan"], "--request-seconds: expected seconds from 0.001"),
        (["--host", "256.1.1.1"], "--host, --port: expected an address that is free"),
        (["--api-key-file", "/nowhere"], "error: --api-key-file: /nowhere: No such file"),
        (["--api-key-file", "/dev/null"], "error: --api-key-file: /dev/null: expected one API key"),
        (["--chat-template", "gpt"], "--chat-template: chat template: expected a file or one of"),
        (
            ["--disk-cache", "/dev/null/pages"],
            "error: --disk-cache: expected a directory that can be written, got /dev/null/pages (",
        ),
        (
            ["--program-store", "/dev/null"],
            "error: --program-store: expected a directory that can be written, got /dev/null (",
        ),
        (
            [
                *("--role", "decode", "--prefill-url", "http://127.0.0.1:1"),
                *("--prefill-api-key-file", "/nowhere"),
            ],
            "error: --prefill-api-key-file: /nowhere: No such file",
        ),
        (
            ["--max-len", "100000"],
            "--max-len: expected 2 to 4096 (the model's max_position_embeddings), got 100000",
        ),
    ],
)
def test_errors_are_one_line(arguments, message, capsys, own_compile_cache):
    assert main(["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize(("given", "expected"), [(None, 4096), ("100", 100), ("4096", 4096)])
def test_the_longest_request(given, expected):
    words = [] if given is None else ["--max-len", given]
    config = SimpleNamespace(max_position_embeddings=4096)
    assert flags.max_len_of(parser().parse_args(["serve", *words]), config) == expected
    short = SimpleNamespace(max_position_embeddings=50)
    if given is None:
        assert flags.max_len_of(parser().parse_args(["serve"]), short) == 50


def test_probes_are_logged_for_debugging_alone(server, caplog):
    def paths() -> list[str]:
        for path in ("/health", "/ready", "/metrics", "/version", "/v1/models"):
            server.request("GET", path)
        seen: list[str] = []
        end = time.monotonic() + 60
        while "/v1/models" not in seen:  # a request is logged after its answer was sent
            assert time.monotonic() < end
            lines = [r.getMessage() for r in caplog.records if r.name == access_log.__name__]
            seen = [json.loads(line)["path"] for line in lines]
        caplog.clear()
        return seen

    with caplog.at_level("INFO", access_log.__name__):
        assert paths() == ["/v1/models"]
    with caplog.at_level("DEBUG", access_log.__name__):
        assert paths() == ["/health", "/ready", "/metrics", "/version", "/v1/models"]


def test_the_log_level(capsys):
    logger = logging.getLogger("dsv3_jax.engine")
    before = list(logging.getLogger("dsv3_jax").handlers)
    with access_log.log_to_stderr("warning"), access_log.log_to_stderr("debug"):
        access_log.logger.info('{"path": "/v1/models"}')
        logger.info("loaded")
        logger.warning("compiling after warm-up")
    with access_log.log_to_stderr("info"):
        access_log.logger.info('{"path": "/v1/models"}')
        logger.debug("details")
        logger.info("loaded")
    assert capsys.readouterr().err.splitlines() == [
        "dsv3: compiling after warm-up",
        '{"path": "/v1/models"}',
        "dsv3: loaded",
    ]
    assert logging.getLogger("dsv3_jax").handlers == before


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["serve"]) == 2
    _, err = capsys.readouterr()
    assert "pip install '.[serve]'" in err
    assert err.count("\n") == 1


def test_api_key_files(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# people\nalpha\n\n  beta  \n", "utf-8")
    keys = ApiKeys.read(file)
    assert [keys.has(key) for key in ("alpha", "beta", "", "# people", "alph")] == (
        [True, True, False, False, False]
    )
    file.write_text("# nobody\n", "utf-8")
    with pytest.raises(ValueError, match="expected one API key on each line, got none"):
        ApiKeys.read(file)
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="expected UTF-8 text"):
        ApiKeys.read(file)


@pytest.mark.slow
def test_keys_and_times():
    """A server with keys, a time limit for requests, and one for bodies."""
    keys = ApiKeys(["secret"])
    limits = {"api_keys": keys, "request_seconds": 0.5, "body_seconds": 0.3}
    body = {"model": "demo", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "n": 4}
    with running(*demo_engine(), **limits) as server:
        assert server.request("GET", "/health")[0] == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            status, names, answer = server.request("GET", "/v1/models", headers=headers)
            assert status == 401
            assert names["www-authenticate"] == "Bearer"
            assert json.loads(answer)["error"]["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer secret"}
        assert server.request("POST", "/chat/spans", body)[0] == 401
        assert server.request("GET", "/v1/models", headers=right)[0] == 200
        assert server.request("GET", "/v1/models", headers={"X-API-Key": "secret"})[0] == 200
        status, _, answer = server.request("POST", "/v1/completions", body, right)
        assert (status, json.loads(answer)["error"]["type"]) == (504, "timeout_error")
        stream = {**body, "stream": True}
        status, _, answer = server.request("POST", "/v1/completions", stream, right)
        *_, error, done, _ = answer.decode().split("\n\n")
        assert (status, done) == (200, "data: [DONE]")
        assert json.loads(error.removeprefix("data: "))["error"]["type"] == "timeout_error"
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Authorization", "Bearer secret")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        assert connection.getresponse().status == 408
        connection.close()


@pytest.mark.slow
def test_sigterm_finishes_open_requests(tmp_path):
    arguments = ["serve", "--port", "0", "--max-len", "256", "--max-running", "4"]
    arguments += ["--drain-seconds", "300", "--compile-cache", str(ROOT / ".jax_cache")]
    process = subprocess.Popen(
        [sys.executable, "-m", "dsv3_jax", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()))
    port = None
    while port is None:
        lines.append(process.stderr.readline())
        assert process.poll() is None, lines
        address = re.search(r"http://127.0.0.1:(\d+)", lines[-1])
        port = address and int(address[1])
    reader.start()
    server = RunningServer(port, None, None)  # pyright: ignore[reportArgumentType]
    try:
        statuses = []
        for _ in range(600):
            try:
                statuses.append(server.request("GET", "/ready")[0])
            except ConnectionRefusedError:
                statuses.append(0)
            if statuses[-1] == 200:
                break
            time.sleep(0.2)
        assert statuses[-1] == 200
        assert 503 in statuses  # while it compiled
        body = {"model": "demo", "prompt": "SECRET", "max_tokens": 60, "ignore_eos": True}
        answers: list[dict] = []
        clients = [
            threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
            for _ in range(6)
        ]
        for client in clients:
            client.start()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        for client in clients:
            client.join()
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [60] * 6
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stderr.close()
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    assert [line["completion_tokens"] for line in logged if line["method"] == "POST"] == [60] * 6
    assert "SECRET" not in "".join(lines)
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
def test_a_killed_server_serves_again_and_ends_in_time(tmp_path):
    """The second server has the first one's port and programs. It ends open requests itself, with
    their tokens so far, when the time to drain is over."""
    settings = {"program_store": str(tmp_path), "drain_seconds": 1.0}
    body = {"model": "demo", "prompt": "x", "max_tokens": 6, "temperature": 0}
    long = body | {"max_tokens": 250, "ignore_eos": True, "n": 2}
    with ServerProcess(**settings) as first:
        server = first.ready()
        expected = server.post("/v1/completions", body)["choices"]
        with ThreadPoolExecutor(1) as pool:
            lost = pool.submit(server.request, "POST", "/v1/completions", long)
            time.sleep(0.3)
            first.process.kill()
            with pytest.raises((ConnectionError, http.client.HTTPException)):
                lost.result(60)
    slow = "read = Executor.wait; Executor.wait = lambda self: (time.sleep(0.05), read(self))[1]"
    with ServerProcess(server.port, change=slow, **settings) as second:
        server = second.ready()
        assert server.post("/v1/completions", body)["choices"] == expected
        with ThreadPoolExecutor(2) as pool:
            whole = pool.submit(server.refused, "/v1/completions", long)
            stream = {**body, "max_tokens": 250, "ignore_eos": True, "stream": True}
            streamed = pool.submit(server.request, "POST", "/v1/completions", stream)
            time.sleep(1)
            began = time.monotonic()
            second.process.send_signal(signal.SIGTERM)
            status, error = whole.result(60)
            assert (status, error["code"]) == (503, "overloaded")
            status, _, content = streamed.result(60)
            *chunks, last, done, _ = content.decode().split("\n\n")
            assert (status, done) == (200, "data: [DONE]")
            assert (
                "the server ended it" in json.loads(last.removeprefix("data: "))["error"]["message"]
            )
            assert len(chunks) > 5
        assert second.wait() == 0
        assert time.monotonic() - began < 10
        assert not any("Traceback" in line for line in second.lines)


def test_a_model_that_does_not_fit(monkeypatch, capsys, own_compile_cache):
    def load(*arguments, **settings):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\n at"
        )

    monkeypatch.setattr(loading, "load", load)
    assert main(["serve", "--port", "0"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 2)
    assert err.startswith(
        "dsv3: loading demo\ndsv3 serve: error: demo: expected a model and a cache"
    )
    assert err.endswith("got: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\n")


def test_a_program_store_on_cpus_turns_the_cache_off(
    monkeypatch, capsys, tmp_path, own_compile_cache
):
    """Otherwise nothing would be stored, see ProgramStore.save."""
    is_enabled = []

    def load(*arguments, **settings):
        is_enabled.append(jax.config.values["jax_enable_compilation_cache"])
        raise ValueError("load: stopped")

    monkeypatch.setattr(loading, "load", load)
    cache = ["--compile-cache", str(tmp_path)]
    assert main(["serve", "--port", "0", *cache]) == 2
    assert "--program-store" not in capsys.readouterr().err
    assert main(["serve", "--port", "0", *cache, "--program-store", str(tmp_path)]) == 2
    assert "--program-store keeps the programs" in capsys.readouterr().err
    assert is_enabled == [True, False]


def test_programs_are_stored_where_the_flag_says(server, tmp_path, monkeypatch):
    directories = []
    monkeypatch.setattr(server.engine, "warm_up", lambda store: directories.append(store) or 0.0)
    stored = dataclasses.replace(server.service.settings, program_store=tmp_path)
    monkeypatch.setattr(server.service, "settings", stored)
    asyncio.run(server.service.warm_up())
    assert directories == [tmp_path]


def test_a_failed_warm_up_is_reported(server, monkeypatch, caplog):
    def fail(store):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(server.engine, "warm_up", fail)
    monkeypatch.setattr(server.service, "is_ready", False)
    monkeypatch.setattr(server.service, "warm_up_failure", None)
    asyncio.run(server.service.warm_up())
    assert "its programs do not compile" in caplog.text
    for path, expected in (("/ready", 503), ("/health", 503)):
        status, _, body = server.request("GET", path)
        assert status == expected
    assert "warm-up: out of memory" in body.decode()
    prompt = {"model": "demo", "prompt": "x", "max_tokens": 1}
    assert server.request("POST", "/v1/completions", prompt)[0] == 500
