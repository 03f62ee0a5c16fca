"""The benchmark of HTTP compares figures of the same round, and serves what it measures."""

from __future__ import annotations

import functools

import pytest

from benchmarks.serving.local_server import random_tokenizer
from dsv3_jax.engine import Engine
from scripts import bench_http
from tests.engine.conftest import BUCKETS


def test_medians_are_those_of_rounds():
    """The machine is half as fast in the second of three rounds, for both ways alike."""
    speeds = {"engine": iter([100.0, 50.0, 100.0]), "http": iter([90.0, 45.0, 80.0])}

    def way(name):
        def run():
            speed = next(speeds[name])
            added = 2.0 if name == "http" else 0.0
            return {
                "output_tokens_per_second": speed,
                "ttft_p50_ms": 1000 / speed + added,
                "tpot_p50_ms": 1.0 + added,
            }

        return run

    compared = bench_http.compare({name: way(name) for name in speeds}, rounds=3)
    assert compared["throughput_ratio"] == 0.9
    assert compared["added_tpot_p50_ms"] == 2.0
    assert compared["added_ttft_p50_ms"] == pytest.approx(4.2222, abs=1e-3)
    assert [each["output_tokens_per_second"] for each in compared["http"]] == [90.0, 45.0, 80.0]


def test_answers_that_are_missing_are_an_error():
    with pytest.raises(RuntimeError, match="expected 3 answers, got 2"):
        bench_http.over_http({"completed": 2}, 3)


def test_requests_that_would_be_shortened_are_refused(capsys):
    words = ["--model", "demo", "--count", "4", "--max-len", "32"]
    assert bench_http.main(words) == 2
    assert capsys.readouterr().err.startswith("--max-len: 4 requests are longer than it")


def test_a_random_tokenizer():
    tokenizer = random_tokenizer(500)
    assert tokenizer.vocab_size == 500
    assert tokenizer.decode(tokenizer.encode("ab cd")) == "ab cd"
    assert len(tokenizer.decode(list(range(1, 500)))) > 2000


@pytest.mark.slow
def test_the_demo(capsys, monkeypatch):
    monkeypatch.setattr(bench_http, "Engine", functools.partial(Engine, buckets=BUCKETS))
    words = ["--model", "demo", "--scale", "0.05", "--count", "4", "--rounds", "1"]
    assert bench_http.main([*words, "--max-running", "4", "--max-len", "400"]) == 0
    assert '"throughput_ratio"' in capsys.readouterr().out
