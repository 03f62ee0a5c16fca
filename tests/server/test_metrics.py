"""/metrics, as Prometheus reads it, and the probes."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

import dsv3_jax


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


def test_probes(server):
    for path in ("/health", "/ready"):
        assert server.request("GET", path)[0] == 200
    status, headers, content = server.request("GET", "/version")
    assert (status, content.decode()) == (200, f'{{"version":"{dsv3_jax.__version__}"}}')
    assert len(headers["x-request-id"]) == 32
