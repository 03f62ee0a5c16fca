"""Malformed and hostile bodies get a 4xx with one clear line, and leave the engine untouched."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import time

import pytest

from tests.server.hostile_bodies import MESSAGES, VALID, hostile_bodies

VALUES = [
    *(None, True, False, -1, 0, 1e308, -(10**400), 2**64, 0.1, "", "x", "\x00", "\ud800"),
    *([], [[]], [None], ["x", 1], {}, {"x": {}}, [1e400], "{{ 1 / 0 }}", "NaN", [2**70] * 3),
]

RAW = [
    *(b"", b"null", b"[]", b"1", b'"x"', b"{", b"}", b'{"model"}', b"\xff\xfe", b'{"a":\xff}'),
    *(b"[" * 100_000, b'{"a":' * 50_000, b"NaN", b'{"temperature": NaN}', b"1" * 5000),
    *(b'{"model": "demo", "prompt": "x", "temperature": Infinity}', b"\x00" * 100),
    b'{"model": "demo", "prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
    b'{"model": "demo", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"model": "demo", "prompt": "\xed\xa0\x80"}',
]


def mutated(rng: random.Random, path: str) -> bytes:
    """Returns a body with a wrong field, or cut or changed bytes."""
    fields = json.loads(json.dumps(VALID[path]))
    kind = rng.randrange(4)
    if kind == 0:
        names = [*fields, "n", "stop", "seed", "logprobs", "logit_bias", "stream_options", "top_p"]
        fields[rng.choice(names)] = rng.choice(VALUES)
    elif kind == 1:
        fields[rng.choice("abcdef") * rng.randrange(1, 300)] = rng.choice(VALUES)
    content = json.dumps(fields).encode()
    if kind == 2:
        return content[: rng.randrange(len(content))]
    if kind == 3:
        position = rng.randrange(len(content))
        return content[:position] + rng.randbytes(2) + content[position + 1 :]
    return content


def check(server, path: str, content: bytes) -> int:
    status, _, answer = server.request("POST", path, content)
    if status != 200:
        error = json.loads(answer)["error"]
        assert 400 <= status < 500, (content[:200], error)
        check_error(error, path, content)
    return status


def check_error(error: dict[str, str], path: str, content: bytes) -> None:
    further = set() if path == MESSAGES else {"param", "code"}
    assert set(error) == {"message", "type"} | further
    assert error["message"], content[:200]
    assert "\n" not in error["message"], content[:200]
    assert len(error["message"]) < 600, content[:200]
    assert "Traceback" not in error["message"]


@pytest.mark.parametrize("path", VALID)
def test_malformed_bodies(server, path):
    server.wait_until_idle()
    steps = server.engine.stats().steps
    for content in RAW:
        assert check(server, path, content) == 400, content[:80]
    server.wait_until_idle()
    assert server.engine.stats().steps == steps


def test_a_thousand_hostile_bodies(server):
    """Each is refused on its own, by a server that goes on."""
    server.wait_until_idle()
    steps, bodies = server.engine.stats().steps, hostile_bodies()
    assert len(bodies) >= 1000
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        for path, content in bodies:
            began = time.monotonic()
            connection.request("POST", path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            assert response.status == 400, (path, content[:200], answer)
            check_error(json.loads(answer)["error"], path, content)
            assert time.monotonic() - began < 10, content[:200]
    assert server.service.admission.open == 0
    assert server.engine.stats().steps == steps
    assert server.service.failure is None


def test_text_is_never_a_template(server):
    messages = [{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}]
    tokens = server.post("/tokenize", {"messages": messages})["tokens"]
    assert "{{ 7 * 7 }}{% raw %}" in server.post("/detokenize", {"tokens": tokens})["prompt"]


@pytest.mark.parametrize("path", VALID)
def test_mutated_bodies(server, path):
    rng = random.Random(7)
    statuses = [check(server, path, mutated(rng, path)) for _ in range(100)]
    assert statuses.count(400) > 50
    server.wait_until_idle()
    server.engine.check_integrity()
    assert server.service.failure is None


def test_large_bodies(server):
    limit = server.service.settings.max_body_bytes
    status, error = server.refused("/v1/completions", b"x" * (limit + 1))
    assert status == 413
    assert f"at most {limit} bytes" in error["message"]
    status, _, _ = server.request(
        "POST", "/v1/completions", b"5\r\nhello\r\n0\r\n\r\n", {"Transfer-Encoding": "chunked"}
    )
    assert status == 400


def test_other_media_types_and_methods(server):
    content = json.dumps(VALID["/v1/completions"]).encode()
    headers = {"Content-Type": "text/plain"}
    assert server.request("POST", "/v1/completions", content, headers)[0] == 400
    status, _, answer = server.request("GET", "/v1/completions")
    assert (status, json.loads(answer)["error"]["type"]) == (405, "invalid_request_error")
    assert server.request("GET", "/nothing")[0] == 404
