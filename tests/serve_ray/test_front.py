"""The front, before scripted replicas: what is sent again, and how a stream ends."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

import dsv3_jax
from dsv3_jax.engine import EngineRequest
from dsv3_jax.generation.completion import Completion
from dsv3_jax.serve_ray.call import Call, answer
from dsv3_jax.serve_ray.front import Batches, Front, NoReplicaError, ReplicaLostError
from dsv3_jax.server.app import create_app
from dsv3_jax.server.service import ServerSettings
from dsv3_jax.tokenizer import Tokenizer
from tests.server.scripted import ScriptedEngine

START = {"type": "http.response.start", "status": 200, "headers": []}
STREAM = {**START, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
FULL = {**START, "status": 503, "headers": [(b"x-replica-id", b"r0")]}


def part(text: str, *, more: bool = True) -> dict:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


WHOLE = [[START, part("{}", more=False)]]


class Script:
    """Replicas that answer one call after the other as told. An exception ends an answer."""

    def __init__(self, *answers: list):
        self.answers = list(answers)
        self.calls: list[Call] = []
        self.closed = 0

    async def open(self, call: Call) -> Batches:
        self.calls.append(call)
        try:
            for each in self.answers.pop(0):
                if isinstance(each, Exception):
                    raise each
                if each == "wait":
                    await asyncio.Future()
                yield each
        finally:
            self.closed += 1

    async def metrics(self) -> bytes:
        return b"figures"


def ask(script: Script, path: str = "/v1/chat/completions", **options) -> tuple[int, dict, str]:
    """Sends a request. Returns the status, the headers and the body."""
    return asyncio.run(send(script, path, **options))


async def send(
    script: Script,
    path: str,
    *,
    goes_away: bool = False,
    probe_seconds: float = 0.05,
    root_path: str = "",
) -> tuple[int, dict, str]:
    sent: list[dict] = []
    incoming = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive():
        if incoming:
            return incoming.pop()
        await asyncio.sleep(0.02 if goes_away else 60)
        return {"type": "http.disconnect"}

    async def collect(message):
        sent.append(message)

    front = Front(script.open, script.metrics, attempts=3, probe_seconds=probe_seconds)
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    scope["root_path"] = root_path
    await front(scope, receive, collect)
    if not sent:
        return 0, {}, ""
    start, *bodies = sent
    assert all(m["type"] == "http.response.body" for m in bodies)
    assert [m.get("more_body", False) for m in bodies] == [True] * (len(bodies) - 1) + [False]
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], headers, b"".join(m["body"] for m in bodies).decode()


def test_an_answer_passes_unchanged():
    script = Script(WHOLE)
    status, headers, body = ask(script)
    assert (status, body, headers["x-attempts"]) == (200, "{}", "1")
    assert script.calls[0].body == b"{}"


def test_a_front_can_be_mounted_anywhere():
    script = Script(WHOLE)
    assert ask(script, "/pool/v1/models", root_path="/pool")[0] == 200
    assert script.calls[0].scope["path"] == "/v1/models"
    assert "root_path" not in script.calls[0].scope
    assert ask(Script(), "/pool/metrics", root_path="/pool")[2] == "figures"


def test_a_request_is_sent_again_when_its_replica_is_lost():
    script = Script([ReplicaLostError()], [ReplicaLostError()], WHOLE)
    status, headers, body = ask(script)
    assert (status, body, headers["x-attempts"]) == (200, "{}", "3")
    assert script.closed == 3


def test_a_replica_that_is_lost_after_its_answer_is_of_no_interest():
    assert ask(Script([*WHOLE, ReplicaLostError()]))[::2] == (200, "{}")


def test_a_replica_that_is_full_is_avoided():
    script = Script([[FULL, part("busy", more=False)]], WHOLE)
    assert ask(script)[0] == 200
    assert [call.avoid for call in script.calls] == [frozenset(), {"r0"}]


def test_attempts_are_bounded():
    status, _, body = ask(Script(*[[ReplicaLostError()]] * 3))
    assert status == 503
    assert json.loads(body)["error"]["code"] == "overloaded"
    status, _, body = ask(Script(*[[[FULL, part("busy", more=False)]]] * 3))
    assert (status, body) == (503, "busy")


def test_errors_of_the_request_are_not_sent_again():
    for status in (400, 429, 500, 504):
        refused = [{**START, "status": status}, part("no", more=False)]
        assert ask(Script([refused]))[::2] == (status, "no")


def test_no_replica():
    status, headers, body = ask(Script([NoReplicaError("replicas: all are full")]))
    assert (status, headers["retry-after"]) == (503, "1")
    assert json.loads(body)["error"]["message"] == "replicas: all are full"


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/chat/completions", "data: [DONE]\n\n"),
        ("/v1/completions", "data: [DONE]\n\n"),
        ("/v1/messages", ""),
        ("/v1/responses", ""),
    ],
)
def test_a_stream_that_has_begun_ends_with_one_error(path, end):
    script = Script([[STREAM, part("data: 1\n\n")], [part("data: 2\n\n")], ReplicaLostError()])
    status, _, body = ask(script, path)
    assert status == 200
    assert len(script.calls) == 1
    assert body.startswith("data: 1\n\ndata: 2\n\n")
    assert body.endswith(end)
    rest = body.removeprefix("data: 1\n\ndata: 2\n\n").removesuffix(end)
    assert rest.count("data: ") == 1
    event = json.loads(rest.partition("data: ")[2])
    assert "its replica was lost" in rest
    if path == "/v1/responses":
        assert (event["type"], event["sequence_number"]) == ("error", 2)
    elif path == "/v1/messages":
        assert rest.startswith("event: error\n")
        assert event["error"]["type"] == "api_error"
    else:
        assert event["error"]["code"] == "replica_lost"


def test_another_answer_that_has_begun_closes_its_connection():
    with pytest.raises(ConnectionError, match="lost in the middle"):
        ask(Script([[START, part("half")], ReplicaLostError()]))


def test_a_client_that_goes_away_cancels_its_call():
    script = Script([[STREAM, part("data: 1\n\n")], "wait"])
    with pytest.raises(AssertionError):  # the stream has no end
        ask(script, goes_away=True)
    assert script.closed == 1


def test_probes_do_not_wait_for_replicas():
    status, _, body = ask(Script(["wait"]), "/ready")
    assert (status, json.loads(body)["error"]["message"]) == (503, "replicas: none is ready")


def test_figures_are_those_of_all_replicas():
    assert ask(Script(), "/metrics")[2] == "figures"


# ---- the other end -------------------------------------------------------------------------------


def batches(endpoint: Callable, *, stop_after: int = 100) -> list[list[dict]]:
    """Returns the messages of a replica with one endpoint, in the groups in which they come."""

    async def collect():
        app = Starlette()
        app.add_route("/", endpoint)
        call = Call.of({"type": "http", "method": "GET", "path": "/", "headers": []}, b"", None)
        messages = []
        async for batch in (answers := answer(app, call, "r7")):
            messages.append(batch)
            if len(messages) == stop_after:
                break
        await answers.aclose()
        return messages

    return asyncio.run(collect())


def test_a_whole_answer_is_one_batch():
    (batch,) = batches(lambda request: JSONResponse({"a": 1}))
    assert (b"x-replica-id", b"r7") in batch[0]["headers"]
    assert batch[1]["body"] == b'{"a":1}'


class Job:
    def __init__(self):
        self.handles = [EngineRequest(lambda request: None)]


def streaming(request: Request) -> Response:
    request.state.job = job = Job()

    async def events():
        yield "opening"
        await asyncio.sleep(0.01)
        job.handles[0].deliver("x", [1], [0.0], None)
        for i in range(3):
            yield str(i)
            await asyncio.sleep(0.01)

    return StreamingResponse(events())


def test_a_stream_begins_with_its_first_token():
    first, *others = batches(streaming)
    assert [m.get("body") for m in first] == [None, b"opening", b"0"]
    assert [[m["body"] for m in each] for each in others] == [[b"1"], [b"2"], [b""]]


def test_nothing_is_lost_while_a_batch_is_on_its_way():
    async def parts():
        for i in range(20):
            yield str(i)
            await asyncio.sleep(0)

    async def collect() -> str:
        app = Starlette()
        app.add_route("/", lambda request: StreamingResponse(parts()))
        call = Call.of({"type": "http", "method": "GET", "path": "/", "headers": []}, b"", None)
        text = b""
        async for batch in answer(app, call, "r7"):
            text += b"".join(message.get("body", b"") for message in batch)
            for _ in range(7):  # the application goes on meanwhile
                await asyncio.sleep(0)
        return text.decode()

    assert asyncio.run(collect()) == "".join(map(str, range(20)))


def test_a_stream_without_tokens_passes_at_once():
    async def parts():
        for i in range(2):
            yield str(i)
            await asyncio.sleep(0.01)

    parts_of_each = batches(lambda request: StreamingResponse(parts()))
    assert [[m.get("body") for m in each] for each in parts_of_each] == [
        [None, b"0"],
        [b"1"],
        [b""],
    ]


def test_closing_an_answer_cancels_its_application():
    cancelled = []

    async def events():
        try:
            while True:
                yield "x"
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    def endpoint(request: Request) -> Response:
        request.state.job = job = Job()
        job.handles[0].deliver("x", [1], [0.0], None)
        return StreamingResponse(events())

    assert len(batches(endpoint, stop_after=2)) == 2
    assert cancelled


def test_an_error_of_the_application_is_an_answer():
    def endpoint(request: Request) -> Response:
        raise LookupError("oops")

    (batch,) = batches(endpoint)
    assert batch[0]["status"] == 500


class LateEngine(ScriptedEngine):
    """An engine whose first token is late."""

    def submit_all(self, prompts: Any, *, n: int = 1, **settings: Any) -> list[EngineRequest]:
        handle = EngineRequest(lambda request: None)

        def deliver() -> None:
            handle.deliver("ab", [1, 2], [0.0, 0.0], None)
            completion = Completion("ab", [1, 2], [0.0, 0.0], "length", 3)
            handle.deliver("", [], [], None, completion)

        threading.Timer(0.05, deliver).start()
        return [handle]


def test_a_chat_can_be_sent_again_until_its_first_token():
    tokenizer = Tokenizer(Path(dsv3_jax.__file__).parent / "demo")
    engine: Any = LateEngine(tokenizer)
    app = create_app(engine, tokenizer, ServerSettings("demo", 256, 12))
    app.state.service.is_ready = True
    messages = [{"role": "user", "content": "x"}]
    body = json.dumps({"model": "demo", "messages": messages, "stream": True}).encode()
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}

    async def collect() -> list[list[dict]]:
        call = Call.of({**scope, "query_string": b""}, body, None)
        return [batch async for batch in answer(app, call, "r7")]

    first = asyncio.run(collect())[0]
    assert [message["type"] for message in first[:2]] == [START["type"], "http.response.body"]
    # The chunk with the role comes at once, but travels with the first text.
    text = b"".join(message.get("body", b"") for message in first).decode()
    assert '"role":"assistant"' in text
    assert '"content":"ab"' in text
