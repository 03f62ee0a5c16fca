"""The client of completions, against a server that follows a script."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dsv3_jax.cli.main import main
from dsv3_jax.client.chat import ChatServer
from dsv3_jax.client.completions import CompletionClient, RequestRecord
from dsv3_jax.client.workload import closed_loop, open_loop

USAGE = {"choices": [], "usage": {"completion_tokens": 7}}
TEXT = {"choices": [{"index": 0, "text": "x"}], "usage": None}
MODEL = {"id": "scripted", "max_model_len": 64}


class Script(http.server.BaseHTTPRequestHandler):
    """Answers each request with the events of its server, after their delays."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        self._whole(200, {"data": [MODEL]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body | {"key": self.headers["Authorization"]})
        if isinstance(self.server.script, int):
            self._whole(self.server.script, {"error": {"message": "no,\nthank you"}})
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for delay, event in self.server.script:
            time.sleep(delay)
            if event is None:
                self.close_connection = True
                return
            data = f"data: {json.dumps(event)}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _whole(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def scripted(script: list[tuple[float, Any]] | int) -> Iterator[Any]:
    """Runs a server. ``script`` is the status of an error, or events with their delays; None closes
    the connection."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Script) as server:
        it: Any = server
        it.script, it.bodies = script, []
        it.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield it
        finally:
            server.shutdown()
            thread.join()


async def complete(url: str) -> RequestRecord:
    async with CompletionClient(url + "/", "secret") as client:
        model = await client.served_model()
        return await client.complete(model.name, [5, 6], 7)


def test_times_and_tokens_of_a_stream():
    with scripted([(0.1, TEXT), (0.2, TEXT), (0, USAGE)]) as server:
        record = asyncio.run(complete(server.url))
    assert (record.prompt_tokens, record.output_tokens, record.error) == (2, 7, "")
    first, second = record.chunks
    assert 0.1 <= first < 0.3 <= second < 1.3  # since the request; a busy machine is late
    (body,) = server.bodies
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("scripted", [5, 6], 7)
    assert (body["key"], body["ignore_eos"]) == ("Bearer secret", True)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (503, "status 503: no, thank you"),
        ([(0, TEXT), (0, {"error": {"message": "too slow"}})], "too slow"),
        ([(0, TEXT), (0, None)], "payload is not completed"),
        ([(0, TEXT)], "expected a usage"),
        ([(0, TEXT), (0, {"usage": {}})], "expected a usage"),
        ([(0, {"usage": {"tokens": 1}})], "'completion_tokens'"),
    ],
)
def test_failed_requests(script, message):
    with scripted(script) as server:
        record = asyncio.run(complete(server.url))
    assert message in record.error
    assert "\n" not in record.error


def test_no_server_and_no_success(capsys):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1", "--num-requests", "1"]) == 2
    assert "/v1/models: expected a server, got: Cannot connect" in capsys.readouterr().err
    with scripted(503) as server:
        assert main(["bench", "serve", "--url", server.url]) == 2
    assert "a first request failed: status 503: no, thank you" in capsys.readouterr().err


def test_arrivals_and_clients():
    async def measure() -> None:
        began, sent, open_now, most = time.perf_counter(), {}, 0, 0

        async def send(i: int) -> Any:
            nonlocal open_now, most
            sent[i] = time.perf_counter() - began
            open_now += 1
            most = max(most, open_now)
            await asyncio.sleep(0.04)
            open_now -= 1
            return i

        assert await open_loop(send, [0.0, 0.02, 0.1]) == [0, 1, 2]
        assert sent[1] == pytest.approx(0.02, abs=0.015)
        assert sent[2] == pytest.approx(0.1, abs=0.015)
        assert most == 2
        most = 0
        assert await closed_loop(send, 7, 3) == list(range(7))
        assert most == 3

    asyncio.run(measure())


def test_chat_events_and_errors():
    def delta(**fields: str) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": fields}]}

    script = [(0, delta(role="assistant", content="")), (0, delta(reasoning="hm")), (0, USAGE)]
    script += [(0, delta(content="yes")), (0, {"error": {"message": "too slow"}})]
    with scripted(script) as server:
        chat = ChatServer(server.url, None, None, {"top_p": 0.5})
        answer = chat.answer([{"role": "user", "content": "?"}])
        assert [next(answer) for _ in range(3)] == [("", ""), ("", "hm"), ("yes", "")]
        with pytest.raises(ValueError, match="too slow"):
            next(answer)
        assert (server.bodies[0]["model"], server.bodies[0]["top_p"]) == ("scripted", 0.5)
        server.script = 400
        with pytest.raises(ValueError, match=r"no,\nthank you"):
            next(chat.answer([]))
    with pytest.raises(ValueError, match=r"expected a server, got: .*refused"):
        ChatServer(server.url, None, None, {})
