"""/metrics, as Prometheus reads it, and the probes."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

import dsv3_jax
from dsv3_jax.engine import EngineError, EngineRequest, RequestError
from dsv3_jax.server.grammar import GrammarError


def figures(server) -> dict[str, float]:
    """Returns the sum of each figure over its labels, without those of histograms' buckets."""
    status, headers, content = server.request("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(content.decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "demo"
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


def test_names_that_routers_read(server):
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    counters = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
    expected = {f"vllm:{name}" for name in (*gauges, "cache_config_info")}
    expected |= {f"vllm:{name}_total" for name in (*counters, "num_preemptions")}
    expected |= {f"vllm:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted")}
    assert expected <= set(figures(server))


def test_a_request_is_counted(server):
    server.wait_until_idle()
    before = figures(server)
    prompt = server.tokenizer.encode("metrics")
    body = {"model": "demo", "prompt": prompt, "max_tokens": 5, "n": 2, "ignore_eos": True}
    server.post("/v1/completions", body)
    server.wait_until_idle()
    after = figures(server)
    difference = {name: after[name] - before.get(name, 0) for name in after}
    assert difference["vllm:generation_tokens_total"] == 10
    assert difference["vllm:request_success_total"] == 2
    for name in ("time_to_first_token", "e2e_request_latency", "request_time_per_output_token"):
        assert difference[f"vllm:{name}_seconds_count"] == 2
        assert 0 < difference[f"vllm:{name}_seconds_sum"] < 60
    assert after["vllm:num_requests_running"] == 0


def reasons(server) -> dict[str, float]:
    """Returns the number of completions by the reason of their end."""
    content = server.request("GET", "/metrics")[2].decode()
    families = {f.name: f for f in text_string_to_metric_families(content)}
    samples = families["vllm:request_success"].samples
    return {s.labels["finished_reason"]: s.value for s in samples if s.name.endswith("_total")}


def ended(server, before: dict[str, float], count: int) -> dict[str, float]:
    """Waits until ``count`` completions have ended since ``before``. Returns their reasons."""
    for _ in range(3000):
        after = {k: v - before[k] for k, v in reasons(server).items() if v != before[k]}
        if sum(after.values()) == count:
            break
        time.sleep(0.01)
    return after


BODIES = {
    "/v1/completions": {"prompt": "x", "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "n": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
    "/v1/responses": {"input": "x"},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_go_away_are_counted(scripted_server, engine, monkeypatch, path, stream):
    server, before = scripted_server[0], reasons(scripted_server[0])
    assert set(before) == {"stop", "length", "abort", "error"}
    submitted, cancelled = threading.Event(), []

    def submit_all(prompts, *, n, **settings):
        handles = [EngineRequest(cancelled.append) for _ in range(n)]
        handles[0].deliver("x", [7], [0.0], None)  # the rest never comes
        submitted.set()
        return handles

    monkeypatch.setattr(engine, "submit_all", submit_all)
    body = {"model": "demo", "stream": stream, **BODIES[path]}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        assert submitted.wait(60)
    count = body.get("n", 1)
    assert ended(server, before, count) == {"abort": count}
    while len(cancelled) < count:
        time.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish_reason", "reason"),
    [("stop", "stop"), ("length", "length"), ("timeout", "abort"), ("cancelled", "abort")],
)
def test_each_end_is_counted_once(scripted_server, engine, finish_reason, reason, stream):
    server, before = scripted_server[0], reasons(scripted_server[0])
    latencies = figures(server)["vllm:e2e_request_latency_seconds_count"]
    engine.text, engine.finish_reason = "words", finish_reason
    server.request("POST", "/v1/completions", {"model": "demo", "prompt": "x", "stream": stream})
    assert ended(server, before, 1) == {reason: 1}
    latencies = figures(server)["vllm:e2e_request_latency_seconds_count"] - latencies
    assert latencies == (reason == finish_reason)


@pytest.mark.parametrize("error", [EngineError("x"), RequestError("request: x"), "grammar"])
def test_failures_are_counted(scripted_server, engine, monkeypatch, error):
    """A grammar that is refused at run time, too. The other completion is cancelled."""
    server, before = scripted_server[0], reasons(scripted_server[0])
    if error == "grammar":
        error = RequestError("request: x")
        error.__cause__ = GrammarError("structured_outputs: too complex")

    def submit_all(prompts, *, n, **settings):
        handles = [EngineRequest(lambda request: None) for _ in range(n)]
        handles[0].fail(error)
        return handles

    monkeypatch.setattr(engine, "submit_all", submit_all)
    status = server.request("POST", "/v1/completions", {"model": "demo", "prompt": "x", "n": 2})[0]
    assert status == (400 if error.__cause__ else 500)
    assert ended(server, before, 2) == {"error": 1, "abort": 1}
    sums = figures(server)
    assert all(value == value for value in sums.values())  # no NaN


def test_probes(server):
    for path in ("/health", "/ready"):
        assert server.request("GET", path)[0] == 200
    status, headers, content = server.request("GET", "/version")
    assert (status, content.decode()) == (200, f'{{"version":"{dsv3_jax.__version__}"}}')
    assert len(headers["x-request-id"]) == 32
