"""The serving benchmark: options, tables, pictures, and the comparison with sequential requests."""

from __future__ import annotations

import json
import shlex
import threading
from types import SimpleNamespace

import pytest

from benchmarks.serving.closed_loop import Comparison, compare
from benchmarks.serving.host_time import measure
from dsv3_jax.engine.device.dispatch_times import DispatchFigures, ShapeTimes
from scripts import bench_engine
from tests.engine.conftest import tiny_mtp  # noqa: F401


def test_buckets_of_the_command_line():
    sizes = "--decodes 2 8 --chunks 1 4 --chunk-tokens 64 --max-running 32"
    buckets = bench_engine.buckets(bench_engine.parse(shlex.split(sizes)))
    assert buckets.decodes == (2, 8, 32)
    assert buckets.chunks == (1, 4)
    assert buckets.chunk_tokens == 64


def test_the_histogram_begins_with_the_shape_that_took_longest():
    shapes = {"decodes=4": ShapeTimes(10, 0.5), "decodes=64 chunks=2": ShapeTimes(100, 1.5)}
    figures = DispatchFigures(0.1, 2.0, 0.5, shapes)
    assert bench_engine.histogram(figures.as_json()).splitlines() == [
        "no dispatch in flight: 20.0% of the time under load",
        "  steps   seconds  share       ms  shape",
        "    100     1.500  75.0%    15.00  decodes=64 chunks=2",
        "     10     0.500  25.0%    50.00  decodes=4",
    ]


class Clients:
    """Stands in for an engine. It counts requests that are in it at the same time."""

    def __init__(self, is_right: bool = True):
        self.is_right = is_right
        self.inside = self.most = self.cleared = 0
        self._lock = threading.Lock()

    def clear_prefix_cache(self) -> None:
        self.cleared += 1

    def submit(self, prompt, *, max_new_tokens, ignore_eos):
        assert ignore_eos
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
            is_right = self.is_right or self.cleared == 1  # requests alone come first

        def result():
            with self._lock:
                self.inside -= 1
            return SimpleNamespace(tokens=[prompt[0]] * max_new_tokens if is_right else [])

        return SimpleNamespace(result=result)


def test_both_arms_serve_every_prompt_in_every_round():
    engine = Clients()
    compared = compare(engine, [[i] for i in range(40)], 7, concurrency=4, rounds=3)
    assert engine.cleared == 2 * 4  # with the round that is not counted
    assert engine.most <= 4
    assert (compared.requests, compared.output_tokens) == (40, 280)
    assert len(compared.ratios) == 3


def test_other_tokens_than_alone_are_an_error():
    with pytest.raises(ValueError, match=r"prompt \d+: expected \[0, 0\] as alone, got \[\]"):
        compare(Clients(is_right=False), [[0]] * 9, 2, concurrency=8, rounds=1)


def test_the_ratio_is_the_median_of_the_rounds():
    summary = Comparison(16, 32, 2048, [30.0, 20.0, 100.0], [10.0, 10.0, 10.0]).summary()
    assert summary["ratio"] == 3.0
    assert summary["ratios"] == [3.0, 2.0, 10.0]
    assert summary["concurrent_tokens_per_second"] == 30.0


# One slot and one size of prefill, so that there are few programs.
SMALL = ["--max-running", "1", "--max-len", "120"]
SMALL += ["--chunks", "2", "--chunk-tokens", "16", "--max-steps", "2"]


@pytest.mark.slow
class TestCommand:
    @pytest.fixture(autouse=True)
    def tiny(self, tiny_mtp, monkeypatch):  # noqa: F811
        monkeypatch.setattr(bench_engine, "load", lambda name, weights: tiny_mtp)

    def test_against_sequential(self, tmp_path):
        out = tmp_path / "ratio.json"
        words = ["--against-sequential", "--concurrency", "4", "--rounds", "1"]
        assert bench_engine.main([*words, *SMALL, "--out", str(out)]) == 0
        result = json.loads(out.read_text())
        assert (result["concurrency"], result["requests"]) == (4, 8)
        assert result["ratio"] > 0

    def test_pictures(self, tmp_path):
        words = ["--scale", "0.02", "--offline-count", "6", "--count", "3", "--rates", "50"]
        words += ["--picture", str(tmp_path / "run.svg")]
        assert bench_engine.main([*words, *SMALL]) == 0
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["run_chat_50.svg", "run_chat_offline.svg"]

    def test_a_generator_completes_the_same_requests(self, tmp_path):
        out = tmp_path / "both.json"
        words = [
            "--scale",
            "0.02",
            "--offline-count",
            "5",
            "--generator",
            "2",
            "--reproducible",
            "--out",
            str(out),
        ]
        assert bench_engine.main([*words, *SMALL]) == 0
        result = json.loads(out.read_text())
        (engine,), (generator,) = result["replays"], result["generator"]
        equal = "trace", "requests", "prompt_tokens", "output_tokens"
        assert [engine[name] for name in equal] == [generator[name] for name in equal]
        assert generator["batch_sizes"] == [2]


def test_the_host_time_of_steps_whose_device_takes_none():
    stats = measure(max_running=2, steps=20, count=5)
    assert stats.steps == 20
    assert 20 < stats.output_tokens <= 40
    assert all(us > 0 for us in stats.host_us.values())
